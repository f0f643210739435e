/* zerokern_io: the C ABI of the disk engine, part of libzerokern_cpu.
 *
 * An engine moves spans between files and memory: requests are queued by any thread, cut into blocks, kept in flight up
 * to a depth by one thread of the engine, and each ends with its own result. Nothing is printed or thrown. Functions
 * return ZK_OK, a negative zk_error, or a positive errno of the system call that refused.
 *
 * O_DIRECT wants memory, offset and length aligned. Offsets must be; memory and length need not: what does not fit goes
 * through a bounce buffer of the engine, a block at a time, and is counted. A last part below the alignment is written
 * with zeros behind it, up to the alignment.
 */
#ifndef ZEROKERN_IO_H
#define ZEROKERN_IO_H

#include "zerokern_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zk_io zk_io;

typedef enum zk_io_kind {
    ZK_IO_URING = 1,  /* io_uring, registered files and buffers where the system grants them */
    ZK_IO_THREADS = 2 /* a pool of threads in pread and pwrite */
} zk_io_kind;

typedef enum zk_io_op { ZK_IO_READ = 1, ZK_IO_WRITE = 2 } zk_io_op;

/* zk_io_request.flags */
#define ZK_IO_PADDED \
    1u /* aligned memory goes on to the next multiple of the alignment: an odd length needs no bounce */

/* One transfer. The memory of the request and of its span is the caller's and stays until `state` is ZK_IO_DONE. */
typedef struct zk_io_request {
    uint32_t op;
    uint32_t flags;
    int32_t file;  /* number from zk_io_file */
    int32_t state; /* written last, with release order */
    uint64_t offset;
    void *address;
    uint64_t nbytes;
    struct zk_io_request *after; /* null, or a request of the same engine that must have ended first, well or not */
    /* the result */
    int32_t error;     /* 0 or an errno; ENODATA where the file ends too early */
    uint32_t bounced;  /* whether any part went through a bounce buffer */
    uint64_t error_at; /* file offset of the block that failed */
    uint64_t error_nbytes;
    /* the engine's own */
    struct zk_io_request *next, *waiting;
    uint64_t issued;
    uint32_t blocks, engine_flags;
} zk_io_request;

#define ZK_IO_IDLE 0    /* never submitted */
#define ZK_IO_PENDING 1 /* queued or in flight */
#define ZK_IO_WAITED 2  /* the same, and a thread sleeps on it */
#define ZK_IO_DONE 3

/* Faults, for tests: what the device would do on a bad day, drawn for each block from `seed`. Chances are of 65536. */
typedef struct zk_io_faults {
    uint64_t seed;
    uint32_t delay, delay_us; /* a completion is held back up to delay_us, so that others overtake it */
    uint32_t shorten;         /* moves only a part, a multiple of the alignment, and says so */
    uint32_t interrupt;       /* EINTR, nothing moved */
    uint32_t again;           /* EAGAIN, nothing moved */
    uint32_t full;            /* the submission queue takes nothing this time */
    uint32_t fail;            /* fail_errno, nothing moved */
    int32_t fail_errno;       /* with `fail`, and for the span below */
    /* blocks of operation fail_op (0: any) that touch [fail_begin, fail_end) of file fail_file (-1: any) fail, at most
     * fail_count times (-1: always) */
    uint32_t fail_op;
    int32_t fail_file;
    int32_t fail_count;
    uint64_t fail_begin, fail_end;
} zk_io_faults;

typedef struct zk_io_options {
    uint32_t kind;
    uint32_t depth;             /* blocks in flight: 1 to 4096 */
    uint64_t block;             /* bytes of a block: a multiple of 4096, up to 1 GiB */
    uint32_t threads;           /* ZK_IO_THREADS: 1 to 256 */
    uint32_t bounces;           /* bounce buffers of one block each, made when first needed: 1 to 4096 */
    const zk_io_faults *faults; /* null outside of tests */
} zk_io_options;

/* What an engine has done and is made of. */
typedef struct zk_io_stats {
    uint64_t read_nbytes, written_nbytes; /* moved by the device, padding included */
    uint64_t bounced_nbytes;              /* copied through bounce buffers */
    uint64_t blocks;                      /* completed transfers */
    uint64_t retries;                     /* EINTR, EAGAIN, and the rest of short transfers */
    uint64_t calls;                       /* io_uring_enter, or pread and pwrite */
    uint64_t pending;                     /* requests that have not ended */
    uint32_t fixed_buffers, fixed_files;  /* registered with the kernel */
    uint32_t ring_features, ring_flags;   /* as io_uring_setup told, 0 elsewhere */
} zk_io_stats;

/* *engine = a running engine. A positive result is why io_uring was refused here (ENOSYS, EPERM, ENOMEM). */
ZK_API int zk_io_open(const zk_io_options *options, zk_io **engine);
/* Waits until every request has ended, then frees the engine. In a forked child it only lets go of what it inherited.
 */
ZK_API int zk_io_close(zk_io *engine);

/* *number = the file's place in the engine. memory_align and offset_align: powers of two, 1 for buffered files. The
 * descriptor stays the caller's, and open until zk_io_forget_file, which waits for requests on it. */
ZK_API int zk_io_file(zk_io *engine, int fd, uint32_t memory_align, uint32_t offset_align, int32_t *number);
ZK_API int zk_io_forget_file(zk_io *engine, int32_t number);

/* Registers memory for transfers without page pinning, in pieces of at most 1 GiB. A positive result names a refusal
 * (ENOMEM: RLIMIT_MEMLOCK); transfers work all the same. The memory stays until zk_io_forget_memory or close. */
ZK_API int zk_io_memory(zk_io *engine, void *base, uint64_t nbytes);
ZK_API int zk_io_forget_memory(zk_io *engine, void *base);

/* Queues n requests, all or none: *bad = the first one that is not possible, nothing was queued then. */
ZK_API int zk_io_submit(zk_io *engine, zk_io_request *const *requests, int64_t n, int64_t *bad);
/* Sleeps until the request has ended or the time is over (ns < 0: without end). ZK_OK, or ETIMEDOUT. A forked child
 * must not wait for what its parent submitted: it would sleep for good. */
ZK_API int zk_io_wait(zk_io_request *request, int64_t ns);

ZK_API int zk_io_stats_of(zk_io *engine, zk_io_stats *stats);

/* What O_DIRECT asks of an open file, from statx: 0 and 0 where the file system has no O_DIRECT; ENOTSUP where the
 * kernel cannot tell (before 6.1). */
ZK_API int zk_io_alignment(int fd, uint32_t *memory_align, uint32_t *offset_align);

/* CRC-32C (Castagnoli) of the bytes, going on from `crc` (0 to begin). Null: there are none, whatever nbytes says. */
ZK_API uint32_t zk_crc32c(uint32_t crc, const void *data, uint64_t nbytes);
/* Which implementation runs: "sse4.2", "crc32" (aarch64) or "table". */
ZK_API const char *zk_crc32c_name(void);

/* Memory that belongs to this process alone and stays resident: MADV_DONTFORK, then mlock. A positive result is why
 * mlock was refused; MADV_DONTFORK holds then all the same. */
ZK_API int zk_memory_lock(void *base, uint64_t nbytes);
ZK_API int zk_memory_unlock(void *base, uint64_t nbytes);
/* Pages of this memory that are first touched from now on lie on these NUMA nodes: on the one, or on all in turn. Where
 * a node is full the system takes another. A positive result is why the system refused. `base` is the start of a page.
 */
ZK_API int zk_memory_bind(void *base, uint64_t nbytes, const int *nodes, int count);

#ifdef __cplusplus
}
#endif
#endif
