// Where many tensors or their gradients lie, and what is known of them, in one call and with nothing linked: the
// framework's own functions are handed in.

#include "zerokern_cpu.h"

namespace {

constexpr int64_t AHEAD = 12;  // tensors whose objects are fetched while those before them are looked at

void fetch(const void *tensor) {
    for (int64_t line = 0; line < 192; line += 64) __builtin_prefetch(static_cast<const char *>(tensor) + line);
}

void fetch_ahead(const void *const *tensors, int64_t i, int64_t count) {
    if (i + AHEAD < count) fetch(tensors[i + AHEAD]);
}

// What the caller took for granted about tensor i still holds; *grad is then its gradient's address.
bool as_expected(const zk_tensor_calls &ask, const zk_tensor_list &list, int64_t i, void **grad) {
    const void *const *gradient = list.gradients ? &list.gradients[i] : ask.grad(list.tensors[i]);
    void *address = nullptr;
    int32_t layout = -1, dtype = -1;
    int64_t numel = -1;
    bool defined = false, contiguous = false;
    if (ask.is_defined(gradient, &defined) || !defined) return false;
    const void *const *tensor = &list.tensors[i];
    if (list.addresses && (ask.address(tensor, &address) || address != list.addresses[i])) return false;
    if (ask.dtype(tensor, &dtype) || dtype != list.dtypes[i]) return false;
    if (ask.numel(tensor, &numel) || numel != list.numels[i]) return false;
    if (ask.is_contiguous(tensor, &contiguous) || !contiguous) return false;
    if (ask.layout(gradient, &layout) || layout != list.layout) return false;
    if (ask.dtype(gradient, &dtype) || dtype != list.grad_dtypes[i]) return false;
    if (ask.numel(gradient, &numel) || numel != list.numels[i]) return false;
    if (ask.is_contiguous(gradient, &contiguous) || !contiguous) return false;
    if (ask.is_negated(gradient)) return false;  // its memory holds the opposite of what it means
    return ask.address(gradient, grad) == 0;
}

}  // namespace

int64_t zk_gradients(const zk_tensor_calls *ask, const zk_tensor_list *list, void **grads) {
    if (!ask || !list || !grads) return ZK_E_NULL;
    for (int64_t i = 0; i < list->count; ++i) {
        fetch_ahead(list->tensors, i, list->count);
        if (list->gradients) fetch_ahead(list->gradients, i, list->count);
        if (!as_expected(*ask, *list, i, &grads[i])) return i;
    }
    return list->count;
}

int64_t zk_in_place(const zk_tensor_calls *ask, const void *const *tensors, void *const *addresses, int64_t count) {
    if (!ask || (count > 0 && (!tensors || !addresses))) return ZK_E_NULL;
    for (int64_t i = 0; i < count; ++i) {
        fetch_ahead(tensors, i, count);
        void *address = nullptr;
        if (ask->address(&tensors[i], &address) || address != addresses[i]) return i;
    }
    return count;
}

int64_t zk_in_cells(const void *const *const *cells, const void *const *tensors, int64_t count) {
    if (count > 0 && (!cells || !tensors)) return ZK_E_NULL;
    for (int64_t i = 0; i < count; ++i) {
        if (i + AHEAD < count) __builtin_prefetch(cells[i + AHEAD]);
        if (*cells[i] != tensors[i]) return i;
    }
    return count;
}

int64_t zk_have_gradients(const zk_tensor_calls *ask, const void *const *tensors, const void *const *gradients,
                          int64_t count) {
    if (!ask || (count > 0 && !tensors)) return ZK_E_NULL;
    for (int64_t i = 0; i < count; ++i) {
        fetch_ahead(tensors, i, count);
        const void *const *gradient = ask->grad(tensors[i]);
        const void *wanted = gradients ? gradients[i] : nullptr;
        bool defined = false;
        if (ask->is_defined(gradient, &defined) || (defined ? *gradient : nullptr) != wanted) return i;
    }
    return count;
}

int64_t zk_versions(int64_t (*version)(const void *const *cell), const void *const *tensors, int64_t *versions,
                    int64_t count) {
    if (!version || (count > 0 && (!tensors || !versions))) return ZK_E_NULL;
    for (int64_t i = 0; i < count; ++i) {
        fetch_ahead(tensors, i, count);
        versions[i] = version(&tensors[i]);
    }
    return count;
}

int64_t zk_trained(bool (*requires_grad)(const void *tensor), const void *const *tensors, uint8_t *trained,
                   int64_t count) {
    if (!requires_grad || (count > 0 && (!tensors || !trained))) return ZK_E_NULL;
    for (int64_t i = 0; i < count; ++i) {
        fetch_ahead(tensors, i, count);
        trained[i] = requires_grad(tensors[i]);
    }
    return count;
}

int64_t zk_raise_versions(void (*raise)(const void *const *cell), const void *const *const *cells, int64_t count) {
    if (!raise || (count > 0 && !cells)) return ZK_E_NULL;
    for (int64_t i = 0; i < count; ++i) {
        if (i + 2 * AHEAD < count) __builtin_prefetch(cells[i + 2 * AHEAD]);
        if (i + AHEAD < count) fetch(*cells[i + AHEAD]);
        raise(cells[i]);
    }
    return count;
}
