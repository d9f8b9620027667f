// Runs CUDA kernels on a CPU: one block after another, with a fiber for each thread that yields at barriers.
// This verifies arithmetic and synchronization, but neither speed nor the memory reordering of a GPU.
#pragma once

#include <csetjmp>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(threads)
// Blocks run one at a time, so shared memory may be static.
#define __shared__ static
#define threadIdx (running->index)

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

/// Releases its threads once all have arrived.
struct Barrier {
  unsigned size = 0, waiting = 0, opened = 0;
};

struct Thread {
  /// Entry point and resume point; a jump needs no system call.
  ucontext_t context;
  std::jmp_buf place;
  bool is_started = false;
  std::vector<char> stack;
  Dim index;
  float exchanged = 0;
  bool is_done = false;
  /// The barrier that the thread waits at, and how often it had opened before.
  Barrier *barrier = nullptr;
  unsigned opened = 0;

  bool is_waiting() const { return barrier != nullptr && barrier->opened == opened; }
};

constexpr unsigned WARP_SIZE = 32;
inline Dim blockIdx, blockDim, gridDim;
inline std::vector<Thread> threads;
inline Thread *running;
inline std::jmp_buf scheduler;
inline Barrier block_barrier;
inline std::vector<Barrier> warp_barriers;
inline std::function<void()> kernel;

inline void wait_at(Barrier &barrier) {
  Thread *self = running;
  self->barrier = &barrier;
  self->opened = barrier.opened;
  if (++barrier.waiting == barrier.size) {
    barrier.waiting = 0;
    barrier.opened++;
  } else if (_setjmp(self->place) == 0) {
    _longjmp(scheduler, 1);
  }
}

inline void __syncthreads() { wait_at(block_barrier); }

inline float __shfl_xor_sync(unsigned, float x, unsigned distance) {
  Thread *self = running;
  Barrier &barrier = warp_barriers[self->index.x / WARP_SIZE];
  self->exchanged = x;
  wait_at(barrier);
  const float other = threads[self->index.x ^ distance].exchanged;
  wait_at(barrier);
  return other;
}

// Blocks run one after another, so each sees the writes of earlier ones.
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned *sum, unsigned x) {
  const unsigned before = *sum;
  *sum += x;
  return before;
}

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

inline void run_thread() {
  kernel();
  running->is_done = true;
  _longjmp(scheduler, 1);
}

/// Runs a thread until it waits or ends.
inline void resume(Thread &thread) {
  running = &thread;
  if (_setjmp(scheduler) != 0) return;
  if (thread.is_started) _longjmp(thread.place, 1);
  thread.is_started = true;
  setcontext(&thread.context);
}

/// Whether blocks run in reverse order, because a GPU guarantees none.
inline bool is_reversed = false;

/// Runs `call` once for each thread of each block.
inline void launch(Dim grid, unsigned block_size, std::function<void()> call) {
  constexpr size_t STACK_BYTES = 64 * 1024;
  kernel = std::move(call);
  gridDim = grid;
  blockDim = {block_size, 1, 1};
  const unsigned blocks = grid.x * grid.y * grid.z;
  for (unsigned i = 0; i < blocks; i++) {
    const unsigned block = is_reversed ? blocks - 1 - i : i;
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    block_barrier = {block_size};
    warp_barriers.assign(block_size / WARP_SIZE, {WARP_SIZE});
    threads.resize(block_size);
    for (unsigned i = 0; i < block_size; i++) {
      Thread &thread = threads[i];
      thread.index = {i, 0, 0};
      thread.is_started = thread.is_done = false;
      thread.barrier = nullptr;
      thread.stack.resize(STACK_BYTES);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = STACK_BYTES;
      makecontext(&thread.context, run_thread, 0);
    }
    for (bool is_running = true; is_running;) {
      is_running = false;
      for (Thread &thread : threads) {
        if (thread.is_done) continue;
        is_running = true;
        if (!thread.is_waiting()) resume(thread);
      }
    }
  }
}
