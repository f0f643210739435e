/* A training loop in C on the native library: no Python, no torch. From the root of the source tree:
 *
 *     mkdir -p build
 *     include=$(python -c 'import zerokern as zk; print(zk.get_include())')
 *     library=$(python -c 'import zerokern as zk; print(zk.get_library())')
 *     cc -std=c99 -O2 examples/step.c -I"$include" "$library" -Wl,-rpath,"$(dirname "$library")" -lm -o build/step
 *     build/step
 *
 * A bf16 parameter and its 16-bit remainder, which together are the fp32 master, move towards a target. Each step takes
 * the norm of the bf16 gradient, clips it, and updates.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zerokern_cpu.h"

enum { NUMEL = 1000003, STEPS = 200 };

static void *room(size_t bytes) {
    void *found = calloc(bytes, 1);
    if (!found) exit(1);
    return found;
}

static void check(int code, const char *call) {
    if (code == ZK_OK) return;
    fprintf(stderr, "%s: %s\n", call, zk_error_text(code));
    exit(1);
}

static uint16_t bf16(float value) { /* cut off: a gradient needs no more */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float target(int64_t i) { return (float)(i % 17) / 16.0f - 0.5f; }

int main(void) {
    if (zk_abi() != ZK_ABI) {
        fprintf(stderr, "the library has ABI %d, this program was compiled for %d\n", zk_abi(), ZK_ABI);
        return 1;
    }
    uint16_t *param = room(sizeof *param * NUMEL), *grad = room(sizeof *grad * NUMEL);
    int16_t *remainder = room(sizeof *remainder * NUMEL);
    float *value = room(sizeof *value * NUMEL);
    const int64_t numel = NUMEL;
    double *partials = room(sizeof *partials * (size_t)zk_sumsq_partials(&numel, 1));

    zk_group group = {.algorithm = ZK_ADAM,
                      .grad = ZK_BF16,
                      .master = ZK_MASTER_SPLIT16,
                      .state = ZK_F32,
                      .out = ZK_NONE,
                      .flags = ZK_DECOUPLED,
                      .lr = 1e-2,
                      .beta1 = 0.9,
                      .beta2 = 0.999,
                      .eps = 1e-8};
    zk_segment segment = {.param = param,
                          .remainder = remainder,
                          .exp_avg = room(sizeof(float) * NUMEL),
                          .exp_avg_sq = room(sizeof(float) * NUMEL),
                          .grad = grad,
                          .numel = NUMEL};
    double first = 0.0, square = 0.0;
    for (int step = 1; step <= STEPS; ++step) {
        check(zk_convert(ZK_JOIN16, value, param, remainder, NUMEL), "zk_convert");
        for (int64_t i = 0; i < NUMEL; ++i) grad[i] = bf16(value[i] - target(i));

        const void *sources[1] = {grad};
        check(zk_sumsq(sources, &numel, 1, ZK_BF16, partials, &square), "zk_sumsq");
        const double norm = sqrt(square), most = 10.0;
        const float scale = (float)(norm > most ? most / norm : 1.0);
        if (step == 1) first = norm;

        int64_t bad = 0;
        group.step = step;
        check(zk_update(&segment, 1, &group, 1, &scale, &bad), "zk_update");
    }
    printf("%s, %d threads: %d elements, norm of the gradient %.3g, after %d steps %.3g\n", zk_isa_active(),
           zk_threads(), (int)NUMEL, first, STEPS, sqrt(square));
    return sqrt(square) < first / 20 ? 0 : 1;
}
