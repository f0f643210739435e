"""What a visitor of the repository meets beside the sources: checks on GitHub, forms, how to report and to cite."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .tree import files, make_targets, read

FORMS = ".github/ISSUE_TEMPLATE/"
KINDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


def loaded(path: str) -> Any:
    return yaml.safe_load(read(path))


def forms() -> dict[str, Any]:
    return {path: loaded(path) for path in files(".yml", under=(FORMS,)) if not path.endswith("config.yml")}


def commands(workflow: Any) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    """Those of its first block, in their order, and nothing that the Makefile has not."""
    block = re.findall(r"^```bash\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL)[0]
    wanted = re.findall(r"^make [\w-]+", block, re.MULTILINE)
    run = commands(loaded(".github/workflows/ci.yml"))
    assert len(wanted) == 2 and [one for one in run if one in wanted] == wanted
    assert [one for one in run if one.removeprefix("make ") not in make_targets()] == []


def test_ci_may_only_read() -> None:
    workflow = loaded(".github/workflows/ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


def faults(form: Any) -> list[str]:
    """What GitHub would not accept of an issue form, as far as its documentation says."""
    found = [key for key in ("name", "description", "body") if not form.get(key)]
    ids = [part["id"] for part in form.get("body", ()) if "id" in part]
    found += [f"{name} twice" for name in {name for name in ids if ids.count(name) > 1}]
    for part in form.get("body", ()):
        if part["type"] not in KINDS:
            found.append(f"type {part['type']}")
            continue
        if "value" not in part["attributes"] if part["type"] == "markdown" else not part["attributes"].get("label"):
            found.append(f"no text in {part}")
        if any(not isinstance(one, str | dict) for one in part["attributes"].get("options", ())):
            found.append(f"options of {part['id']}")  # a bare Yes is a truth value
    return found


def test_forms_are_sound_and_wrong_numbers_come_first() -> None:
    assert {path: found for path, form in forms().items() if (found := faults(form))} == {}
    assert sorted(forms())[0] == f"{FORMS}1-wrong-numbers.yml"
    assert [path for path, form in forms().items() if "zerokern info" not in str(form)] == [f"{FORMS}2-gpu-result.yml"]
    assert "bench/gpu.sh OUT" in str(forms()[f"{FORMS}2-gpu-result.yml"])


def test_an_unsound_form_is_found() -> None:
    part = {"type": "dropdown", "id": "a", "attributes": {"label": "b", "options": [True]}}
    assert faults({"name": "a", "body": [part, part]}) == ["description", "a twice", "options of a", "options of a"]
    assert faults({"name": "a", "description": "b", "body": [{"type": "text"}]}) == ["type text"]


def test_links_of_forms_and_of_security_lead_somewhere() -> None:
    pages = "\n".join(read(path) for path in [*files(".yml", under=(".github/",)), "SECURITY.md"])
    here = re.findall(r"github\.com/zerokern/zerokern/blob/main/([\w./-]+)", pages)
    assert here and [path for path in here if path not in files("")] == []
    named = re.findall(r"issues/new\?template=([\w.-]+)", pages)
    assert named and [name for name in named if FORMS + name not in forms()] == []


def test_the_citation_is_of_this_version() -> None:
    citation, project = loaded("CITATION.cff"), read("pyproject.toml")
    assert f'\nversion = "{citation["version"]}"' in project and f'\nlicense = "{citation["license"]}"' in project
    wanted = {"cff-version", "message", "title", "authors", "version", "license", "repository-code"}
    assert wanted <= citation.keys() and citation["cff-version"] == "1.2.0"
