#include "engine.h"

#include <errno.h>
#include <time.h>

#include <cstring>
#include <new>

#include "cut.h"
#include "futex.h"

namespace zk {
namespace io {
namespace {

// A device that has nothing to give for so long is not busy, it is broken.
constexpr uint32_t MOST_TRIES = 2000;
constexpr long PAUSE_NS = 500000;
constexpr uint64_t MOST_NBYTES = 1ull << 61;

// zk_io_request.engine_flags
constexpr uint32_t WAITS = 1, WAS_DONE = 2;

bool is_write(const zk_io_request &request) { return request.op == ZK_IO_WRITE; }

// The request is its owner's from here on.
void tell(zk_io_request *request, bool done) {
    const int32_t state = done ? ZK_IO_DONE : ZK_IO_IDLE;
    if (__atomic_exchange_n(&request->state, state, __ATOMIC_ACQ_REL) == ZK_IO_WAITED) futex_wake(&request->state);
}

}  // namespace

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

void Engine::Queue::push(zk_io_request *request) {
    request->next = nullptr;
    *tail = request;
    tail = &request->next;
}

zk_io_request *Engine::Queue::pop() {
    zk_io_request *request = head;
    if (request && !(head = request->next)) tail = &head;
    return request;
}

// The engine's thread: takes what has come in, keeps the backend full, tells what has ended.
void Engine::run() {
    while (take()) {
        issue();
        OpList ended;
        if (inflight_) {
            // One wakeup for several blocks; a shallow queue is told of each.
            const unsigned least = inflight_ < 8 ? 1 : inflight_ / 8;
            bool sleep;
            {
                std::lock_guard<std::mutex> guard(lock_);
                sleep = !incoming_.head && !commands_;
                // Many blocks in flight will soon wake this thread; a newcomer is worth a call only where few are.
                sleep_ = sleep && inflight_ < few_ ? IN_BACKEND : AWAKE;
            }
            backend_->finish(sleep && again_.empty() ? least : 0, &ended);
        } else {
            backend_->finish(0, &ended);
        }
        while (Op *op = ended.pop()) end(op);
    }
}

// False at the end of the engine's life.
bool Engine::take() {
    std::unique_lock<std::mutex> guard(lock_);
    sleep_ = AWAKE;
    for (;;) {
        while (Command *command = commands_) {
            commands_ = command->next;
            carry_out(command);
            command->done = true;
            answered_.notify_all();
        }
        while (zk_io_request *request = incoming_.pop()) ready_[is_write(*request)].push(request);
        if (inflight_ || !again_.empty() || ready_[0].head || ready_[1].head) return true;
        if (closing_ && !pending_) return false;
        sleep_ = PARKED;
        wake_.wait(guard);
        sleep_ = AWAKE;
    }
}

void Engine::issue() {
    while (Op *op = again_.pop()) {
        op->limit = op->nbytes;
        if (backend_->start(op)) {
            ++inflight_;
            continue;
        }
        again_.push(op);
        return;
    }
    while (again_.empty() && !free_.empty()) {
        Queue &first = ready_[turn_], &second = ready_[turn_ ^ 1];
        turn_ ^= 1;
        if (!issue_one(&first) && !issue_one(&second)) return;
    }
}

// Takes the queue's first request one block further. False where there is none, or no means to.
bool Engine::issue_one(Queue *queue) {
    zk_io_request *request = queue->head;
    if (!request) return false;
    if (!request->nbytes) {
        queue->pop();
        settle(request);
        return true;
    }
    Op *op = free_.pop();
    const Filled filled = fill(op, request);
    if (filled != READY) {
        free_.push(op);
        if (filled == NO_MEMORY) give_up(request, ENOMEM);
        return filled == NO_MEMORY;
    }
    request->issued += op->needed;
    ++request->blocks;
    if (request->issued == request->nbytes) queue->pop();
    if (backend_->start(op))
        ++inflight_;
    else
        again_.push(op);
    return true;
}

// The next block of a request.
Engine::Filled Engine::fill(Op *op, zk_io_request *request) {
    const File &file = files_[request->file];
    char *address = static_cast<char *>(request->address);
    const Span span = {reinterpret_cast<uint64_t>(address), request->nbytes, file.memory_align, file.offset_align,
                       (request->flags & ZK_IO_PADDED) != 0};
    const Cut cut = next_cut(span, request->issued, block_);
    op->bounce = -1;
    op->user = nullptr;
    op->address = address + request->issued;
    if (cut.bounce) {
        if (!bounces_ && !make_bounces()) return NO_MEMORY;
        if (!nfree_bounces_) return NO_BOUNCE_NOW;
        op->bounce = free_bounces_[--nfree_bounces_];
        op->user = op->address;
        op->address = bounces_ + static_cast<uint64_t>(op->bounce) * bounce_nbytes_;
    }
    op->request = request;
    op->write = is_write(*request);
    op->offset = request->offset + request->issued;
    op->nbytes = op->limit = cut.device_nbytes;
    op->needed = cut.user_nbytes;
    op->done = 0;
    op->tries = 0;
    op->align = file.offset_align;
    op->file = request->file;
    op->fd = file.fd;
    op->memory = -1;
    if (op->user && op->write) {
        std::memcpy(op->address, op->user, op->needed);
        std::memset(op->address + op->needed, 0, op->nbytes - op->needed);
    }
    return READY;
}

// An attempt has ended: the block is done, or goes on, or has failed.
void Engine::end(Op *op) {
    --inflight_;
    int64_t error = 0;
    if (op->result > 0) op->tries = 0;
    if (op->result < 0) {
        if (retry(op, &error)) return;
    } else {
        op->done += static_cast<uint64_t>(op->result);
        if (op->done < op->needed) {
            // Direct transfers go on at a whole unit; a device that moved less than one has come to the end of the
            // file.
            op->done -= op->done % op->align;
            if (static_cast<uint64_t>(op->result) >= op->align) {
                ++retries_;
                again_.push(op);
                return;
            }
            error = op->write ? EIO : ENODATA;
        }
    }
    zk_io_request *request = op->request;
    const uint64_t at = op->offset + op->done;
    if (!error) {
        succeed(op);
    } else if (!request->error || at < request->error_at) {
        request->error = static_cast<int32_t>(error);
        request->error_at = at;
        request->error_nbytes = op->needed > op->done ? op->needed - op->done : 0;
    }
    if (op->bounce >= 0) free_bounces_[nfree_bounces_++] = op->bounce;
    --request->blocks;
    free_.push(op);
    if (request->error)
        give_up(request, request->error);
    else if (!request->blocks && request->issued == request->nbytes)
        settle(request);
}

// The rest of a failed request is not tried; it ends when its blocks in flight have.
void Engine::give_up(zk_io_request *request, int error) {
    if (request->issued < request->nbytes) {  // then it is the first of its queue: only that one is cut into blocks
        if (!request->error) {
            request->error_at = request->offset + request->issued;
            request->error_nbytes = request->nbytes - request->issued;
        }
        ready_[is_write(*request)].pop();
        request->issued = request->nbytes;
    }
    request->error = error;
    if (!request->blocks) settle(request);
}

bool Engine::retry(Op *op, int64_t *error) {
    *error = -op->result;
    if (*error != EINTR && *error != EAGAIN) return false;
    if (++op->tries > MOST_TRIES) return false;
    if (*error == EAGAIN && op->tries > 8) {
        const timespec some = {0, PAUSE_NS};
        nanosleep(&some, nullptr);
    }
    ++retries_;
    again_.push(op);
    return true;
}

void Engine::succeed(Op *op) {
    if (op->user) {
        if (!op->write) std::memcpy(op->user, op->address, op->needed);
        op->request->bounced = 1;
        bounced_nbytes_ += op->needed;
    }
    (op->write ? written_nbytes_ : read_nbytes_) += op->nbytes;
    ++nblocks_;
}

// Tells the result; the request is its owner's from then on. Those that waited for it may start now.
void Engine::settle(zk_io_request *request) {
    std::lock_guard<std::mutex> guard(lock_);
    for (zk_io_request *waiting = request->waiting; waiting;) {
        zk_io_request *next = waiting->next;
        ready_[is_write(*waiting)].push(waiting);
        waiting = next;
    }
    File &file = files_[request->file];
    --pending_;
    if (!--file.pending && file.leaving) quiet_.notify_all();
    tell(request, true);
}

bool Engine::refused(const zk_io_request &request) const {
    if (request.op != ZK_IO_READ && request.op != ZK_IO_WRITE) return true;
    if (request.flags & ~ZK_IO_PADDED) return true;
    if (request.file < 0 || request.file >= MOST_FILES) return true;
    const File &file = files_[request.file];
    if (!file.used || file.leaving) return true;
    if (request.offset % file.offset_align || request.offset > MOST_NBYTES || request.nbytes > MOST_NBYTES) return true;
    const int32_t state = __atomic_load_n(&request.state, __ATOMIC_ACQUIRE);
    return (state != ZK_IO_IDLE && state != ZK_IO_DONE) || (request.nbytes && !request.address);
}

// Whether the request that this one comes after has yet to end. Asked in order, so that no circle can be made.
bool Engine::wait_for(const zk_io_request &request) const {
    if (!request.after || request.after == &request) return false;
    const int32_t state = __atomic_load_n(&request.after->state, __ATOMIC_ACQUIRE);
    return state == ZK_IO_PENDING || state == ZK_IO_WAITED;
}

int Engine::submit(zk_io_request *const *requests, int64_t n, int64_t *bad) {
    *bad = 0;
    if (n < 0) return ZK_E_COUNT;
    Sleep was = AWAKE;
    {
        std::lock_guard<std::mutex> guard(lock_);  // settle() takes it too: what is pending now stays so until the end
        int error = closing_ ? ZK_E_VALUE : ZK_OK;
        for (; *bad < n && !error; ++*bad) {
            zk_io_request *request = requests[*bad];
            error = !request ? ZK_E_NULL : refused(*request) ? ZK_E_VALUE : ZK_OK;
            if (error) break;
            request->engine_flags = (wait_for(*request) ? WAITS : 0) | (request->state == ZK_IO_DONE ? WAS_DONE : 0);
            __atomic_store_n(&request->state, ZK_IO_PENDING, __ATOMIC_RELEASE);
        }
        if (error) {
            for (int64_t i = 0; i < *bad; ++i) tell(requests[i], requests[i]->engine_flags & WAS_DONE);
            return error;
        }
        for (int64_t i = 0; i < n; ++i) {
            zk_io_request *request = requests[i];
            request->error = 0;
            request->bounced = request->blocks = 0;
            request->error_at = request->error_nbytes = request->issued = 0;
            request->waiting = nullptr;
            ++pending_;
            ++files_[request->file].pending;
            if (request->engine_flags & WAITS) {
                request->next = request->after->waiting;
                request->after->waiting = request;
            } else {
                incoming_.push(request);
            }
        }
        if (incoming_.head) {
            was = sleep_;
            sleep_ = AWAKE;
        }
    }
    if (was == PARKED) wake_.notify_one();
    if (was == IN_BACKEND) backend_->kick();
    return ZK_OK;
}

}  // namespace io
}  // namespace zk
