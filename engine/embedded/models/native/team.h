// Threads: all run the same function, share out the tasks of each phase, and meet at its end.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int kSpins = 4000;  // at a barrier, before the thread sleeps

inline int64_t nanoseconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

// Where the threads of a team ran last. Linux may wake a thread on the core of another one, and leave it there although another
// core is idle: the two then wait for each other in turns, in every phase. A core is a logical one here.
class Cores {
 public:
  explicit Cores(int threads) : of_(threads) {
    for (auto& core : of_) core = kNone;
  }
  // Notes where one of `running` threads runs, and moves it to a core that none of them has if one before it has the same.
  void keep_apart(int thread, int running) {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (at(thread) != core) of_[thread].store(core, std::memory_order_relaxed);
    for (int before = 0; before < thread && core >= 0; before++)
      if (at(before) == core) return move(thread, running);
#endif
  }

 private:
  static constexpr int kNone = -1;
  static constexpr int64_t kPause = 250'000;  // nanoseconds between moves of a thread, which the system may undo

  int at(int thread) const { return of_[thread].load(std::memory_order_relaxed); }
#if defined(__linux__)
  void move(int thread, int running) {
    thread_local int64_t moved = 0;
    const int64_t now = nanoseconds(CLOCK_MONOTONIC);
    cpu_set_t all, free;
    if (now - moved < kPause) return;
    moved = now;
    if (sched_getaffinity(0, sizeof all, &all)) return;  // there are more cores than the set has room for
    free = all;
    for (int other = 0; other < running; other++)
      if (at(other) != kNone) CPU_CLR(at(other), &free);
    if (!CPU_COUNT(&free) || sched_setaffinity(0, sizeof free, &free)) return;
    sched_setaffinity(0, sizeof all, &all);  // it has moved, and may move again; cores that the process gets later are not for it
    of_[thread].store(sched_getcpu(), std::memory_order_relaxed);
  }
#endif

  std::vector<std::atomic<int>> of_;
};

// A thread whose core is busy with other work delays every phase, and so the whole team. So the team tries out whether it
// works faster with one thread fewer, and later whether with one more.
class TeamSize {
 public:
  explicit TeamSize(int most) : most_(most), size_(most) {}
  int now() const { return size_; }
  // After each run: how long it took, and the processor time that all threads worked in it without waiting.
  void ran(int64_t elapsed, int64_t worked) {
    elapsed_ += elapsed;
    worked_ += worked;
    const float rate = (float)worked_ / elapsed_;  // threads that worked all the time would do as much
    const bool worse = trial_ && rate < rate_;
    if (++runs_ < kRuns && !worse) return;
    elapsed_ = worked_ = runs_ = 0;
    const int64_t time = nanoseconds(CLOCK_MONOTONIC);
    if (trial_) {
      const bool better = rate > kBetter * rate_;
      if (!better) size_ -= trial_;
      pause_ = better ? kPause : std::min(2 * pause_, kLongestPause);
      retry_ = time + pause_;
      trial_ = 0;
    } else if (time >= retry_) {
      rate_ = rate;
      trial_ = rate < kIdle * size_ ? -1 : 1;
      if (size_ + trial_ < 1 || size_ + trial_ > most_) trial_ = 0;
      size_ += trial_;
    }
  }

 private:
  static constexpr int kRuns = 4;           // that are compared
  static constexpr float kBetter = 1.05f;   // than before: the change stays
  static constexpr float kIdle = 0.5f;      // below this share of work in the threads' time, fewer are tried
  static constexpr int64_t kPause = 20'000'000, kLongestPause = 2'000'000'000;  // nanoseconds between trials

  const int most_;
  int size_, trial_ = 0, runs_ = 0;
  float rate_ = 0;
  int64_t elapsed_ = 0, worked_ = 0, pause_ = kPause, retry_ = 0;
};

class Team {
 public:
  explicit Team(int size) : starts_(size), cores_(size), size_(size) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    stopping_ = true;
    wake((int)starts_.size());
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_.now(); }
  // most: how many threads there is work for.
  template <class Work>
  void run(int phases, Work& work, int most = INT_MAX) {
    const int64_t began = nanoseconds(CLOCK_MONOTONIC);
    if (next_.size() < phases * starts_.size()) next_ = std::vector<std::atomic<int>>(phases * starts_.size());
    for (auto& next : next_) next.store(0, std::memory_order_relaxed);
    work_ = &work;
    call_ = [](void* work) { (*static_cast<Work*>(work))(); };
    worked_ = 0;
    running_ = std::min(size_.now(), most);
    wake(running_);
    take_part();
    if (running_ == size_.now()) size_.ran(nanoseconds(CLOCK_MONOTONIC) - began, worked_);
  }
  // Each thread takes its share of the tasks, in order, then what is left of others' shares.
  template <class Task>
  void each(int& phase, int count, Task task) {
    cores_.keep_apart(place_, running_);
    std::atomic<int>* taken = &next_[phase++ * starts_.size()];
    for (int turn = 0; turn < running_; turn++) {
      const long share = (place_ + turn) % running_, begin = share * count / running_, end = (share + 1) * count / running_;
      for (long i; (i = begin + taken[share].fetch_add(1, std::memory_order_relaxed)) < end;) task(i);
    }
    meet();
  }

 private:
  struct alignas(64) Start {
    std::atomic<uint32_t> runs{0};
  };

  void wake(int count) {
    for (int i = 1; i < count; i++) {
      starts_[i].runs.fetch_add(1);
      starts_[i].runs.notify_one();
    }
  }
  void serve(int place) {
    place_ = place;
    for (uint32_t seen = 0;; seen++) {
      starts_[place].runs.wait(seen);
      if (stopping_) return;
      take_part();
    }
  }
  void take_part() {
    spun_ = 0;
    const int64_t before = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    call_(work_);
    worked_ += nanoseconds(CLOCK_THREAD_CPUTIME_ID) - before - spun_;
    meet();
  }
  void meet() {
    const uint32_t met = met_.load();
    const int running = running_;  // once all have arrived, the next run may have begun, with another number
    if (arrived_.fetch_add(1) + 1 == running) {
      arrived_.store(0);
      met_.fetch_add(1);
      met_.notify_all();
      return;
    }
    const int64_t began = nanoseconds(CLOCK_MONOTONIC);
    for (int i = 0; i < kSpins && met_.load(std::memory_order_acquire) == met; i++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    spun_ += nanoseconds(CLOCK_MONOTONIC) - began;
    while (met_.load() == met) met_.wait(met);
  }

  inline static thread_local int64_t spun_ = 0;
  inline static thread_local int place_ = 0;  // of a thread in its team; the one that calls `run` is the first
  std::vector<std::thread> threads_;
  std::vector<Start> starts_;
  Cores cores_;
  std::vector<std::atomic<int>> next_;
  std::atomic<uint32_t> met_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int64_t> worked_{0};
  std::atomic<bool> stopping_{false};
  TeamSize size_;
  int running_ = 0;
  void* work_ = nullptr;
  void (*call_)(void*) = nullptr;
};

}  // namespace
