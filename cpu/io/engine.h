// The engine: requests in, blocks to a backend, results out. One thread owns all that moves; any thread may submit.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "backend.h"

namespace zk {
namespace io {

// Something that the engine's thread does on behalf of another: the kernel wants one thread to talk to a ring.
struct Command {
    enum Kind { ADD_FILE, DROP_FILE, ADD_MEMORY, DROP_MEMORY } kind;
    int32_t number;
    int fd;
    void *base;
    uint64_t nbytes;
    int error;
    bool done;
    Command *next;
};

class Engine {
  public:
    static int open(const zk_io_options &options, Engine **made);
    ~Engine();

    int add_file(int fd, uint32_t memory_align, uint32_t offset_align, int32_t *number);
    int forget_file(int32_t number);
    int add_memory(void *base, uint64_t nbytes);
    int forget_memory(void *base);
    int submit(zk_io_request *const *requests, int64_t n, int64_t *bad);
    void stats(zk_io_stats *stats);
    void close();

    // In a forked child the engine's thread does not exist, and its locks may be held by threads that do not either.
    bool orphaned() const { return orphaned_.load(std::memory_order_acquire); }
    void orphan();

    Engine *next_engine = nullptr;  // of all engines of this process

  private:
    struct File {
        int fd = -1;
        uint32_t memory_align = 1, offset_align = 1;
        bool used = false, leaving = false;
        uint64_t pending = 0;
    };
    struct Piece {
        void *base = nullptr, *arena = nullptr;  // arena: the base that the piece was cut from
        uint64_t nbytes = 0;
    };
    struct Queue {  // of requests, through their `next`
        zk_io_request *head = nullptr, **tail = &head;
        void push(zk_io_request *request);
        zk_io_request *pop();
    };

    explicit Engine(const zk_io_options &options);
    static void *serve(void *engine);
    int begin();
    void run();
    bool take();
    void issue();
    bool issue_one(Queue *queue);
    enum Filled { READY, NO_BOUNCE_NOW, NO_MEMORY };
    Filled fill(Op *op, zk_io_request *request);
    void give_up(zk_io_request *request, int error);
    void end(Op *op);
    bool retry(Op *op, int64_t *error);
    void succeed(Op *op);
    void settle(zk_io_request *request);
    void carry_out(Command *command);
    int ask(Command *command);
    int32_t take_piece(void *base, uint64_t nbytes, void *arena);
    bool make_bounces();
    bool wait_for(const zk_io_request &request) const;
    bool refused(const zk_io_request &request) const;

    const uint32_t depth_, threads_, nbounce_, few_;
    const uint64_t block_;
    const uint32_t kind_;
    const zk_io_faults *faults_;  // until begin() has returned

    std::mutex lock_;  // guards what follows
    std::condition_variable wake_, answered_, quiet_;
    enum Sleep { AWAKE, PARKED, IN_BACKEND } sleep_ = AWAKE;
    Queue incoming_;
    Command *commands_ = nullptr;
    File *files_ = nullptr;
    Piece *pieces_ = nullptr;
    uint64_t pending_ = 0;
    bool closing_ = false;
    int began_ = -1;  // result of begin(), or -1

    // the engine thread's own
    Backend *backend_ = nullptr;
    Op *ops_ = nullptr;
    OpList free_, again_;
    Queue ready_[2];  // reads and writes take turns, so that neither starves
    unsigned turn_ = 0, inflight_ = 0;
    char *bounces_ = nullptr;
    int32_t *free_bounces_ = nullptr;
    uint32_t nfree_bounces_ = 0;
    uint64_t bounce_nbytes_ = 0;
    std::atomic<uint64_t> read_nbytes_{0}, written_nbytes_{0}, bounced_nbytes_{0}, nblocks_{0}, retries_{0};

    pthread_t thread_;
    std::atomic<bool> orphaned_{false};
};

}  // namespace io
}  // namespace zk
