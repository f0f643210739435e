// An engine's beginning and end, and what it is told of files and memory.
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <new>

#include "cut.h"
#include "engine.h"

namespace zk {
namespace io {

Engine::Engine(const zk_io_options &options)
    : depth_(options.depth),
      threads_(options.threads),
      nbounce_(options.bounces < options.depth ? options.bounces : options.depth),
      few_(options.depth < 4    ? options.depth
           : options.depth < 16 ? 4
                                : options.depth / 4),
      block_(options.block),
      kind_(options.kind),
      faults_(options.faults) {}

Engine::~Engine() {
    delete backend_;  // not by its own thread: the kick() that ended it may come late
    delete[] ops_;
    delete[] files_;
    delete[] pieces_;
    delete[] free_bounces_;
    if (bounces_) munmap(bounces_, nbounce_ * bounce_nbytes_);
}

int Engine::open(const zk_io_options &options, Engine **made) {
    Engine *engine = new (std::nothrow) Engine(options);
    if (!engine) return ENOMEM;
    sigset_t all, before;  // signals are for the threads that expect them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&engine->thread_, nullptr, serve, engine);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!error) {
        std::unique_lock<std::mutex> guard(engine->lock_);
        engine->answered_.wait(guard, [&] { return engine->began_ >= 0; });
        error = engine->began_;
        guard.unlock();
        engine->faults_ = nullptr;  // the caller's memory
        if (error) pthread_join(engine->thread_, nullptr);
    }
    if (error) {
        delete engine;
        return error;
    }
    *made = engine;
    return 0;
}

void *Engine::serve(void *self) {
    Engine *engine = static_cast<Engine *>(self);
    prctl(PR_SET_NAME, "zerokern-io");
    const int error = engine->begin();
    {
        std::lock_guard<std::mutex> guard(engine->lock_);
        engine->began_ = error;
        engine->answered_.notify_all();
    }
    if (!error) {
        engine->run();
        engine->backend_->retire();
    }
    return nullptr;
}

// On the engine's own thread: the kernel takes the maker of a ring for its only user.
int Engine::begin() {
    ops_ = new (std::nothrow) Op[depth_];
    files_ = new (std::nothrow) File[MOST_FILES];
    pieces_ = new (std::nothrow) Piece[MOST_PIECES];
    free_bounces_ = new (std::nothrow) int32_t[nbounce_];
    if (!ops_ || !files_ || !pieces_ || !free_bounces_) return ENOMEM;
    for (uint32_t i = 0; i < depth_; ++i) free_.push(&ops_[i]);
    int error = 0;
    backend_ = kind_ == ZK_IO_URING ? make_uring(depth_, &error) : make_threads(threads_, &error);
    if (!backend_ || !faults_) return error;
    Backend *faulty = make_faulty(backend_, *faults_);
    if (!faulty) return ENOMEM;
    backend_ = faulty;
    return 0;
}

void Engine::close() {
    Sleep was;
    {
        std::lock_guard<std::mutex> guard(lock_);
        closing_ = true;
        was = sleep_;
        sleep_ = AWAKE;
    }
    if (was == PARKED) wake_.notify_one();
    if (was == IN_BACKEND) backend_->kick();
    pthread_join(thread_, nullptr);
}

void Engine::orphan() {
    orphaned_.store(true, std::memory_order_release);
    if (backend_) backend_->let_go();
}

// Has the engine's thread carry out a command.
int Engine::ask(Command *command) {
    std::unique_lock<std::mutex> guard(lock_);
    command->error = 0;
    command->done = false;
    command->next = commands_;
    commands_ = command;
    const Sleep was = sleep_;
    sleep_ = AWAKE;
    if (was == PARKED) wake_.notify_one();
    if (was == IN_BACKEND) backend_->kick();
    answered_.wait(guard, [&] { return command->done; });
    return command->error;
}

void Engine::carry_out(Command *command) {
    switch (command->kind) {
        case Command::ADD_FILE:
            command->error = backend_->add_file(command->number, command->fd);
            break;
        case Command::DROP_FILE:
            backend_->drop_file(command->number);
            break;
        case Command::ADD_MEMORY:
            command->error = backend_->add_memory(command->number, command->base, command->nbytes);
            break;
        case Command::DROP_MEMORY:
            backend_->drop_memory(command->number);
            break;
    }
}

int Engine::add_file(int fd, uint32_t memory_align, uint32_t offset_align, int32_t *number) {
    int32_t place = 0;
    {
        std::lock_guard<std::mutex> guard(lock_);
        while (place < MOST_FILES && files_[place].used) ++place;
        if (place == MOST_FILES) return EMFILE;
        File &file = files_[place];
        file.fd = fd;
        file.memory_align = memory_align;
        file.offset_align = offset_align;
        file.used = file.leaving = true;  // nothing is submitted to it yet
    }
    Command command = {};
    command.kind = Command::ADD_FILE;
    command.number = place;
    command.fd = fd;
    ask(&command);  // a refusal costs speed alone
    std::lock_guard<std::mutex> guard(lock_);
    files_[place].leaving = false;
    *number = place;
    return 0;
}

int Engine::forget_file(int32_t number) {
    {
        std::unique_lock<std::mutex> guard(lock_);
        if (number < 0 || number >= MOST_FILES || !files_[number].used || files_[number].leaving) return ZK_E_VALUE;
        files_[number].leaving = true;
        quiet_.wait(guard, [&] { return files_[number].pending == 0; });
    }
    Command command = {};
    command.kind = Command::DROP_FILE;
    command.number = number;
    ask(&command);
    std::lock_guard<std::mutex> guard(lock_);
    files_[number].used = files_[number].leaving = false;
    return 0;
}

// A place for one piece of registered memory, or -1.
int32_t Engine::take_piece(void *base, uint64_t nbytes, void *arena) {
    std::lock_guard<std::mutex> guard(lock_);
    for (int32_t place = 0; place < MOST_PIECES; ++place) {
        if (pieces_[place].base) continue;
        pieces_[place].base = base;
        pieces_[place].nbytes = nbytes;
        pieces_[place].arena = arena;
        return place;
    }
    return -1;
}

int Engine::add_memory(void *base, uint64_t nbytes) {
    for (uint64_t at = 0; at < nbytes; at += PIECE_NBYTES) {
        Command command = {};
        command.kind = Command::ADD_MEMORY;
        command.base = static_cast<char *>(base) + at;
        command.nbytes = nbytes - at < PIECE_NBYTES ? nbytes - at : PIECE_NBYTES;
        command.number = take_piece(command.base, command.nbytes, base);
        const int error = command.number < 0 ? ENOSPC : ask(&command);
        if (error) {
            forget_memory(base);
            return error;
        }
    }
    return 0;
}

int Engine::forget_memory(void *base) {
    bool any = false;
    for (int32_t place = 0; place < MOST_PIECES; ++place) {
        {
            std::lock_guard<std::mutex> guard(lock_);
            if (!base || pieces_[place].arena != base) continue;
        }
        Command command = {};
        command.kind = Command::DROP_MEMORY;
        command.number = place;
        ask(&command);
        any = true;
        std::lock_guard<std::mutex> guard(lock_);
        pieces_[place] = Piece();
    }
    return any ? 0 : ZK_E_VALUE;
}

// On the engine's thread, when the first block needs one. Not of use to a child of a fork.
bool Engine::make_bounces() {
    bounce_nbytes_ = align_up(align_up(block_, 4096), MOST_ALIGN);
    const uint64_t nbytes = nbounce_ * bounce_nbytes_;
    void *base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return false;
    madvise(base, nbytes, MADV_DONTFORK);
    bounces_ = static_cast<char *>(base);
    for (uint32_t i = 0; i < nbounce_; ++i) free_bounces_[nfree_bounces_++] = static_cast<int32_t>(i);
    for (uint64_t at = 0; at < nbytes; at += PIECE_NBYTES) {
        const uint64_t length = nbytes - at < PIECE_NBYTES ? nbytes - at : PIECE_NBYTES;
        const int32_t place = take_piece(bounces_ + at, length, bounces_);
        if (place >= 0) backend_->add_memory(place, bounces_ + at, length);
    }
    return true;
}

void Engine::stats(zk_io_stats *stats) {
    *stats = {};
    stats->read_nbytes = read_nbytes_;
    stats->written_nbytes = written_nbytes_;
    stats->bounced_nbytes = bounced_nbytes_;
    stats->blocks = nblocks_;
    stats->retries = retries_;
    std::lock_guard<std::mutex> guard(lock_);
    stats->pending = pending_;
    backend_->count(stats);
}

}  // namespace io
}  // namespace zk
