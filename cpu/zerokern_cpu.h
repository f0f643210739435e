/* zerokern_cpu: the whole public C ABI of the CPU kernels.
 *
 * Pointers, counts and return codes: no torch, no Python, no exceptions, no OpenMP, nothing printed. Every call is
 * synchronous, may be made from any thread, and gives the same bits whatever the number of threads. Functions return
 * ZK_OK or a negative zk_error. Buffers are aligned to their elements (64 bytes is fastest) and must not overlap unless
 * said so.
 */
#ifndef ZEROKERN_CPU_H
#define ZEROKERN_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZK_API __attribute__((visibility("default")))

/* Raised whenever a struct, an enum or the meaning of a call changes; the loader refuses any other number. */
#define ZK_ABI 8

/* Elements that share one int8 scale, counted from each parameter's element 0. Every work split is a multiple of it. */
#define ZK_BLOCK 128
/* Elements whose squares are summed into one float64 partial by zk_sumsq. */
#define ZK_SUMSQ_CHUNK 65536

typedef enum zk_error {
    ZK_OK = 0,
    ZK_E_NULL = -1,    /* a pointer that the formats need is null */
    ZK_E_COUNT = -2,   /* a negative count, or a group index out of range */
    ZK_E_FORMAT = -3,  /* an unknown dtype, format or algorithm, or a combination that has no kernel */
    ZK_E_VALUE = -4,   /* a hyperparameter that is NaN or out of range */
    ZK_E_ISA = -5,     /* an instruction set that this machine or this build lacks */
    ZK_E_THREADS = -6, /* a thread count below 1 or above 1024 */
    ZK_E_MEMORY = -7,  /* the system refused memory or a thread */
    ZK_E_PROCESS = -8, /* made by the process that this one was forked from */
    ZK_E_CPU = -9      /* a CPU that this process may not use, or a number that is none */
} zk_error;

typedef enum zk_dtype { ZK_NONE = 0, ZK_F32 = 1, ZK_BF16 = 2, ZK_F16 = 3, ZK_INT8 = 4 } zk_dtype;

/* With g = scale * grad (-grad with ZK_MAXIMIZE) and p the master, both fp32, t = step, wd = weight_decay:
 *
 *   ADAM     g += wd * p, unless ZK_DECOUPLED;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
 *            p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps);  with ZK_DECOUPLED p -= lr * wd * p too
 *   LION     c = beta1 * m + (1 - beta1) * g;  m = beta2 * m + (1 - beta2) * g;  p -= lr * (sign(c) + wd * p)
 *   ADAGRAD  g += wd * p;  s += g * g;  p -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
 *   SGD      g += wd * p;  b = momentum * b + (1 - dampening) * g, with ZK_FIRST b = g
 *            p -= lr * g without state, lr * (g + momentum * b) with ZK_NESTEROV, else lr * b
 *   MUON     m = momentum * m + (1 - momentum) * g;  out = (1 - momentum) * g + momentum * m with ZK_NESTEROV, else m
 *            and the sums of squares of out, as it was rounded: there is no parameter; param, master, lr and
 *            weight_decay of the group are ignored
 *
 * These are the meanings. The order of operations, which is also that of the bits, stands in
 * zerokern/kernels/reference.py. States begin with zeros: values, codes and scales alike. */
typedef enum zk_algorithm { ZK_ADAM = 1, ZK_LION = 2, ZK_ADAGRAD = 3, ZK_SGD = 4, ZK_MUON = 5 } zk_algorithm;

/* Where the fp32 value of a parameter is. bits(x) are those of an fp32 number, as an unsigned integer. A NaN becomes
 * 0xFFC00000 before it is split.
 *
 *   SPLIT16  bits(value) = (hi << 16) + remainder, modulo 2^32; hi are the bits of the bf16 parameter, the remainder is
 *            a signed int16. Every bit is kept. hi = (bits(value) + 0x8000) >> 16: the value rounded to nearest, ties
 *            away from zero (a cast to bf16 takes ties to even). To begin from a bf16 parameter: a remainder of zeros.
 *   SPLIT8   bits(value) = (hi << 16) + (remainder << 8), a signed int8: 24 bits are kept. The value is rounded to them
 *            first, r = bits(value) + 0x7F + (bits(value) >> 8 & 1), which is to nearest, ties to even; then
 *            hi = (r + 0x8000) >> 16, and the remainder is byte 1 of r.
 *   NONE     the parameter alone; what is rounded away is lost in each step. */
typedef enum zk_master {
    ZK_MASTER_FP32 = 1,
    ZK_MASTER_SPLIT16 = 2,
    ZK_MASTER_SPLIT8 = 3,
    ZK_MASTER_NONE = 4
} zk_master;

/* zk_group.flags */
#define ZK_DECOUPLED 1u   /* weight decay shrinks the parameter (AdamW) instead of entering the gradient */
#define ZK_MAXIMIZE 2u    /* ascend */
#define ZK_NESTEROV 4u    /* SGD, MUON */
#define ZK_FIRST 8u       /* SGD: the momentum buffer starts as the gradient */
#define ZK_STOCHASTIC 16u /* ZK_MASTER_NONE: round stochastically, counted by (seed, key, step, element) */

/* Formats and hyperparameters shared by any number of segments. */
typedef struct zk_group {
    uint32_t algorithm; /* zk_algorithm */
    uint32_t grad;      /* zk_dtype: F32, BF16, F16 */
    uint32_t param;     /* zk_dtype of the parameter when master is NONE: BF16 or F16; else ignored */
    uint32_t master;    /* zk_master */
    uint32_t state;     /* zk_dtype: F32, BF16, INT8 (ADAM, LION, MUON), NONE (SGD without momentum) */
    uint32_t out;       /* zk_dtype: NONE, BF16, F16; MUON: F32, BF16 */
    uint32_t flags;
    uint32_t reserved; /* 0 */
    double lr, beta1, beta2, eps, weight_decay;
    double momentum, dampening; /* SGD; MUON: momentum, below 1 */
    double lr_decay;            /* ADAGRAD */
    int64_t step;               /* 1 for the first update */
    uint64_t seed;              /* ZK_STOCHASTIC */
} zk_group;

/* One contiguous span of one parameter. Pointers that the group's formats do not need are ignored. */
typedef struct zk_segment {
    void *param;             /* SPLIT16, SPLIT8: the bf16 upper half; NONE: the parameter */
    void *remainder;         /* SPLIT16: int16; SPLIT8: int8 */
    void *master;            /* FP32: the fp32 value */
    void *exp_avg;           /* ADAM and LION exp_avg, ADAGRAD sum, SGD and MUON momentum_buffer */
    void *exp_avg_sq;        /* ADAM; for INT8 codes of its square root. MUON: one double for each started chunk of
                                ZK_SUMSQ_CHUNK elements of out, the sum of its squares as zk_sumsq takes it */
    float *exp_avg_scale;    /* INT8: one per started block */
    float *exp_avg_sq_scale; /* INT8, ADAM */
    const void *grad;
    void *out;     /* group.out != NONE: the published value, written and never read */
    int64_t numel; /* >= 0 */
    uint64_t group;
    uint64_t key;  /* ZK_STOCHASTIC: tells parameters apart */
    int64_t first; /* ZK_STOCHASTIC: number of this segment's element 0 within its parameter; numel more, and a block,
                      are counted */
    uint8_t *changed; /* null, or one bit for each element, the lowest first, which is set where the bits of the
                         published value (out, or else the parameter; FP32 without out: the master) become others; no
                         bit is cleared. ceil(numel / 8) bytes. What an out of another dtype than the parameter's was
                         is the kept value before, rounded to it. MUON: ignored */
} zk_segment;

/* One optimizer step over all segments, every byte touched once. `scale` (null = 1) multiplies the gradients and is
 * read when the call runs. All arguments are checked before anything is written; *bad is then the segment (or -1 -
 * group) at fault, INT64_MAX where neither is. `bad` may be null.
 *
 * `scale` is not checked: a NaN there makes every state and parameter NaN, so look at the norm first. To clip as torch
 * does: norm = sqrt of the sum of zk_sumsq's sums, scale = min(1, max_norm / (norm + 1e-6)), computed in double. Where
 * the norm is not finite, skip the step. With a scaled loss, multiply both norm and scale by the inverse. */
ZK_API int zk_update(const zk_segment *segments, int64_t nseg, const zk_group *groups, int64_t ngroups,
                     const float *scale, int64_t *bad);

/* What changed in one tensor, packed. Of blocks of ZK_BLOCK elements, the last may be shorter, in order: `counts`, a
 * byte each, how many changed; `places`: of a block with none or with all changed nothing, of one with fewer than 16 a
 * byte for each of its changed elements, ascending, else its bits as in zk_segment.changed; `values`: the new words.
 *
 * zk_changed_count gives the counts of a mask, and in `sizes` how many bytes of places and how many values there are;
 * zk_changed_pack fills these. Bits behind the last element count for nothing. zk_changed_unpack writes the values to
 * where they belong in `to`, and nothing elsewhere. Malformed input is ZK_E_COUNT (a count above its block, or sizes
 * that the counts do not add up to) or ZK_E_VALUE (places that are not those of a block); nothing is written then. */
ZK_API int zk_changed_count(const uint8_t *mask, int64_t numel, uint8_t *counts, int64_t *sizes);
ZK_API int zk_changed_pack(const uint8_t *mask, const void *from, uint32_t dtype, int64_t numel, uint8_t *places,
                           void *values);
ZK_API int zk_changed_unpack(const uint8_t *counts, const uint8_t *places, int64_t nplaces, const void *values,
                             int64_t nvalues, uint32_t dtype, int64_t numel, void *to);
/* *sum = the sum of (first + number + 1) * word over the words, modulo 2^64; words are integers without sign of 1, 2, 4
 * or 8 bytes. What parts of a tensor add up to is the tensor's own sum, in any order. */
ZK_API int zk_weighted_sum(const void *words, uint32_t width, int64_t numel, uint64_t first, uint64_t *sum);

/* sums[i] = sum of squares of source i in float64, in an order that depends on nothing but the count; non-finite if an
 * element is. partials: scratch of zk_sumsq_partials(numels, n) doubles. */
ZK_API int64_t zk_sumsq_partials(const int64_t *numels, int64_t n);
ZK_API int zk_sumsq(const void *const *sources, const int64_t *numels, int64_t n, uint32_t dtype, double *partials,
                    double *sums);

/* dst = cast(dst + scale * s0 + scale * s1 + ...) in fp32 from left to right; add = 0 leaves dst out and does not read
 * it. */
ZK_API int zk_accumulate(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t nsources,
                         uint32_t source_dtype, int64_t numel, int add, float scale);
/* zk_accumulate of one source each for many spans of dst: numels[i] elements from begins[i] on, which do not overlap.
 */
ZK_API int zk_collect(void *dst, uint32_t dst_dtype, const void *const *sources, const int64_t *begins,
                      const int64_t *numels, int64_t nsources, uint32_t source_dtype, int add);
/* zk_accumulate, and sums[i], as zk_sumsq gives it, of the numels[i] elements of the result from begins[i] on, without
 * reading them again. Spans come in order and do not overlap; what lies between them is accumulated too.
 * partials: scratch of zk_sumsq_partials(numels, nspans) doubles. */
ZK_API int zk_accumulate_sumsq(void *dst, uint32_t dst_dtype, const void *const *sources, int64_t nsources,
                               uint32_t source_dtype, int64_t numel, int add, float scale, const int64_t *begins,
                               const int64_t *numels, int64_t nspans, double *partials, double *sums);

/* The int8 codecs and the split masters on their own. x: fp32 values (exp_avg_sq_* code the square root of x). */
typedef enum zk_codec {
    ZK_ENCODE_EXP_AVG = 1,
    ZK_DECODE_EXP_AVG = 2,
    ZK_ENCODE_EXP_AVG_SQ = 3,
    ZK_DECODE_EXP_AVG_SQ = 4,
    ZK_SPLIT16 = 5,
    ZK_JOIN16 = 6,
    ZK_SPLIT8 = 7,
    ZK_JOIN8 = 8
} zk_codec;
/* codes: int8, uint8, or the bf16 upper half; aux: the scales, or the remainder. */
ZK_API int zk_convert(uint32_t codec, float *x, void *codes, void *aux, int64_t numel);

/* A framework's functions on its tensors; those that return int32_t return 0 where they succeed. A cell is the place
 * that holds a tensor's address. */
typedef struct zk_tensor_calls {
    const void *const *(*grad)(const void *tensor); /* the cell of its gradient */
    int32_t (*is_defined)(const void *const *cell, bool *yes);
    int32_t (*address)(const void *const *cell, void **address);
    int32_t (*layout)(const void *const *cell, int32_t *layout);
    int32_t (*dtype)(const void *const *cell, int32_t *dtype);
    int32_t (*numel)(const void *const *cell, int64_t *numel);
    int32_t (*is_contiguous)(const void *const *cell, bool *yes);
    bool (*is_negated)(const void *const *cell); /* by a mark, not in memory */
} zk_tensor_calls;

/* Tensors and what is expected of them and of their gradients: addresses of the tensors, or null where they may be
 * anywhere; the gradients, or null for the tensors' own; numels of both, dtypes of each; contiguity of both, and one
 * layout of all gradients. */
typedef struct zk_tensor_list {
    const void *const *tensors;
    void *const *addresses;
    const void *const *gradients;
    const int64_t *numels;
    const int32_t *dtypes;
    const int32_t *grad_dtypes;
    int64_t count;
    int32_t layout;
} zk_tensor_list;

/* grads[i] = where the gradient of tensor i lies. Returns the number of the first tensor that is not as expected, or
 * count. */
ZK_API int64_t zk_gradients(const zk_tensor_calls *ask, const zk_tensor_list *list, void **grads);

/* Whether tensors lie where they did: the number of the first one that does not lie at its address, or count. Only
 * ask->address is called. */
ZK_API int64_t zk_in_place(const zk_tensor_calls *ask, const void *const *tensors, void *const *addresses,
                           int64_t count);

/* Whether cells hold the tensors that they held: the number of the first one that does not, or count. */
ZK_API int64_t zk_in_cells(const void *const *const *cells, const void *const *tensors, int64_t count);

/* Whether tensors have these gradients; a null gradient, or null for all: none. Returns the number of the first tensor
 * that has another, or count. Only ask->grad and ask->is_defined are called. */
ZK_API int64_t zk_have_gradients(const zk_tensor_calls *ask, const void *const *tensors, const void *const *gradients,
                                 int64_t count);

/* versions[i] = version of tensor i. Returns count. */
ZK_API int64_t zk_versions(int64_t (*version)(const void *const *cell), const void *const *tensors, int64_t *versions,
                           int64_t count);

/* trained[i] = 1 where tensor i requires a gradient, else 0. Returns count. */
ZK_API int64_t zk_trained(bool (*requires_grad)(const void *tensor), const void *const *tensors, uint8_t *trained,
                          int64_t count);

/* Calls raise, which must not throw, for the tensors in all of these cells. Returns count. */
ZK_API int64_t zk_raise_versions(void (*raise)(const void *const *cell), const void *const *const *cells,
                                 int64_t count);

/* Copies of tensors. A row has three words: to where, from where, how many bytes. */
typedef struct zk_pair_calls {
    int32_t (*address)(const void *const *cell, void **address);
    int32_t (*layout)(const void *const *cell, int32_t *layout);
    int32_t (*dtype)(const void *const *cell, int32_t *dtype);
    int32_t (*numel)(const void *const *cell, int64_t *numel);
    int32_t (*is_contiguous)(const void *const *cell, bool *yes);
    int32_t (*device_type)(const void *const *cell, int32_t *type);
    int32_t (*device_index)(const void *const *cell, int32_t *index);
    size_t (*itemsize)(int32_t dtype);
    bool (*is_negated)(const void *const *cell);
    bool (*is_conjugated)(const void *const *cell);
} zk_pair_calls;

typedef struct zk_place {
    int32_t type, index;
} zk_place;

/* Which side of pairs is host memory; ZK_UNASKED: they were checked before. */
enum { ZK_UNASKED = 0, ZK_TARGETS = 1, ZK_SOURCES = 2 };

/* Objects, each with a cell `cell` bytes behind its address; where and of which layout both sides are to be; and the
 * host memory [begin, end) that a device is known to reach. */
typedef struct zk_pairs {
    const void *const *targets;
    const void *const *sources;
    int64_t count, cell;
    uint64_t begin, end;
    zk_place target, source;
    int32_t layout, host;
} zk_pairs;

/* rows[i] = the copy of pair i, from pair first on. Returns the number of the first pair that cannot be copied, or
 * whose host memory is not known to be reached; or count. */
ZK_API int64_t zk_spans(const zk_pair_calls *ask, const zk_pairs *pairs, int64_t first, uint64_t *rows);

/* out = the rows with bytes, of which those that follow each other on both sides are one. Returns how many. */
ZK_API int64_t zk_join_spans(const uint64_t *rows, int64_t count, uint64_t *out);

/* out = the rows below nbytes, then the others, each in their order. Returns how many are below. */
ZK_API int64_t zk_part_spans(const uint64_t *rows, int64_t count, uint64_t nbytes, uint64_t *out);

/* out = the rows by the alignment of both addresses: to 16 bytes, 4, 2, and others; counts[i] = how many. */
enum { ZK_SPAN_KINDS = 4 };
ZK_API int64_t zk_sort_spans(const uint64_t *rows, int64_t count, uint64_t *out, int64_t *counts);

/* The roof: reads, updates in place and writes that many streams of nbytes each (at most 8 of a kind). */
ZK_API int zk_stream(const void *const *reads, int nread, void *const *updates, int nupdate, void *const *writes,
                     int nwrite, int64_t nbytes);

/* Instruction sets compiled in, worst first. A null name in zk_isa_force returns to the best usable one. */
ZK_API int zk_isa_count(void);
ZK_API const char *zk_isa_name(int index);
ZK_API const char *zk_isa_needs(int index);
ZK_API int zk_isa_usable(int index);
ZK_API int zk_isa_force(const char *name);
ZK_API const char *zk_isa_active(void);

/* Threads that share one call, the caller included. They start at first use, park when idle and are made anew after a
 * fork. */
ZK_API int zk_threads_set(int count);
ZK_API int zk_threads(void);
/* The CPUs that the pool's own threads run on, all of them on all of these, those that are made later too (after a
 * fork, after zk_threads_set); the caller of a function stays where it is. A count of 0 returns to what the process's
 * first thread may use. The number of threads stays. Waits for calls that run. */
ZK_API int zk_pool_cpus_set(const int *cpus, int count);
/* Writes the CPUs that were set, in order, as far as `room` reaches; returns how many there are, 0 where none were. */
ZK_API int zk_pool_cpus(int *cpus, int room);

ZK_API int zk_abi(void);
ZK_API const char *zk_error_text(int code);
/* Clock of the core this runs on, from a chain of dependent additions. */
ZK_API double zk_core_ghz(void);

#ifdef __cplusplus
}
#endif
#endif
