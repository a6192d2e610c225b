// Runs the CUDA source of the copy kernels on the CPU: a thread for each lane, in step where the source says so.
// KERNELS is the file that holds the source. Exit status 0, or a line on what is wrong.
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
constexpr unsigned THREADS = 64;  // of a block: two warps
static thread_local Index threadIdx, blockIdx;
static Index gridDim, blockDim = {THREADS};
static std::barrier<> block(THREADS), warps[THREADS / 32] = {std::barrier<>(32), std::barrier<>(32)};
static unsigned long long slots[THREADS];

static unsigned long long exchange(unsigned long long mine, unsigned from) {
  const unsigned warp = threadIdx.x / 32;
  slots[threadIdx.x] = mine;
  warps[warp].arrive_and_wait();
  const unsigned long long other = slots[warp * 32 + from % 32];
  warps[warp].arrive_and_wait();
  return other;
}
template <class T> T __shfl_sync(unsigned, T mine, unsigned from) { return (T)exchange(mine, from); }
template <class T> T __shfl_up_sync(unsigned, T mine, unsigned by) {
  const unsigned lane = threadIdx.x % 32;
  return (T)exchange(mine, lane >= by ? lane - by : lane);
}
static unsigned __match_any_sync(unsigned, unsigned mine) {
  unsigned mask = 0;
  for (unsigned lane = 0; lane < 32; ++lane) mask |= (unsigned)(exchange(mine, lane) == mine) << lane;
  return mask;
}
static void __syncthreads() { block.arrive_and_wait(); }
static void __threadfence() {}
static int __ffs(unsigned v) { return __builtin_ffs((int)v); }
static int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
static unsigned long long atomicMin(unsigned long long *p, unsigned long long v) {
  unsigned long long seen = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (v < seen && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return seen;
}

#include KERNELS

template <class Job> void launch(void (*kernel)(const Job), const Job &job, unsigned blocks) {
  gridDim.x = blocks;
  for (unsigned b = 0; b < blocks; ++b) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < THREADS; ++t)
      threads.emplace_back([=, &job] { threadIdx.x = t; blockIdx.x = b; kernel(job); });
    for (auto &thread : threads) thread.join();
  }
}

constexpr u64 OBJECT = 1 << 16, COUNT = 300, ENTRY = 72, GUARD = 1 << 14;
constexpr u32 BINS = 16, SHIFT = 12;

struct World {
  u8 *object = (u8 *)aligned_alloc(OBJECT, 2 * OBJECT), *secret = object + OBJECT;
  std::vector<i64> offsets = std::vector<i64>(COUNT);
  std::vector<u8> dense = std::vector<u8>(COUNT * ENTRY + GUARD, 0xEE);
  std::vector<u32> counts = std::vector<u32>(BINS + 1), starts = std::vector<u32>(BINS + 1, 0xA5A5A5A5);
  std::vector<u32> ranks = std::vector<u32>(COUNT, 0xA5A5A5A5);
  std::vector<Item> items, sorted;
  u64 bad_index = ~0ull;
  u32 bad_flag = 0;

  World() {
    std::mt19937 random(7);
    for (u64 i = 0; i < OBJECT; ++i) object[i] = (u8)(random() % 199), secret[i] = 0xDD;
    for (auto &offset : offsets) offset = random() % (OBJECT - ENTRY + 1);
    // what an earlier gather has left in the scratch memory
    items.assign(COUNT, Item{(u64)secret, COUNT + 9});
    sorted = items;
  }
  ~World() { free(object); }
  EntryJob job(bool put, bool sort) {
    EntryJob job = {};
    job.offsets = (u64)offsets.data(), job.only = {(u64)object, OBJECT}, job.dense = (u64)dense.data();
    job.count = COUNT, job.entry_bytes = ENTRY, job.pieces = 1, job.piece_bytes = ENTRY;
    job.bad_index = (u64)&bad_index, job.bad_flag = (u64)&bad_flag;
    job.counts = (u64)counts.data(), job.starts = (u64)starts.data(), job.ranks = (u64)ranks.data();
    job.items = (u64)items.data(), job.sorted = sort ? (u64)sorted.data() : 0;
    job.bins = BINS, job.page_shift = SHIFT, job.offset_width = 8, job.object_width = 8;
    job.put = put, job.group = 8, job.tile = 4;
    return job;
  }
  void check(bool good, const char *what) {
    if (good) return;
    printf("%s\n", what);
    exit(1);
  }
  void untouched() {
    for (u64 i = COUNT * ENTRY; i < dense.size(); ++i) check(dense[i] == 0xEE, "bytes behind the buffer were written");
    for (u64 i = 0; i < OBJECT; ++i) check(secret[i] == 0xDD, "another object was written");
    for (u64 i = 0; i < COUNT * ENTRY; ++i) check(dense[i] != 0xDD, "another object was read");
    for (u32 count : counts) check(count == 0, "the counts are not as they were");
  }
};

static void run(World &world, const EntryJob &job, bool order, void (*between)(World &)) {
  if (order) {
    launch(egm_bin, job, 3);
    if (between) between(world);
    launch(egm_place, job, 3);
    if (job.sorted) launch(egm_sort, job, 3);
    launch(egm_items, job, 2);
  } else {
    launch(egm_offsets, job, 2);
  }
}

static void gathers(bool order, bool sort) {
  World world;
  world.offsets[40] = -1, world.offsets[41] = OBJECT - ENTRY + 1, world.offsets[42] = (i64)(~0ull >> 1);
  world.offsets[43] = (i64)(world.secret - world.object), world.offsets[44] = OBJECT - ENTRY;
  run(world, world.job(false, sort), order, nullptr);
  for (u64 i = 0; i < COUNT; ++i) {
    const bool bad = i >= 40 && i < 44;
    for (u64 k = 0; k < ENTRY; ++k)
      world.check(world.dense[i * ENTRY + k] == (bad ? 0xEE : world.object[world.offsets[i] + k]), "a wrong byte");
  }
  world.check(world.bad_flag == 1 && world.bad_index == 40, "the first bad offset is not reported");
  world.untouched();
}

static void scatters(bool order, bool sort) {
  World world;
  for (u64 i = 0; i < COUNT; ++i) world.offsets[i] = (i64)((i * 7 % COUNT) * ENTRY);
  for (u64 i = 0; i < COUNT * ENTRY; ++i) world.dense[i] = (u8)(i * 31 % 197);
  run(world, world.job(true, sort), order, nullptr);
  for (u64 i = 0; i < COUNT; ++i)
    world.check(!memcmp(world.object + world.offsets[i], &world.dense[i * ENTRY], ENTRY), "a wrong byte");
  world.check(world.bad_flag == 0, "a good offset is called bad");
  world.untouched();
}

static void changed_meanwhile(bool put, bool sort, void (*change)(World &)) {
  World world;
  for (u64 i = 0; i < COUNT; ++i) world.offsets[i] = (i64)(i * 4);  // all in the first page
  run(world, world.job(put, sort), true, change);
  world.untouched();
}

int main() {
  for (bool sort : {false, true}) {
    gathers(true, sort);
    scatters(true, sort);
    for (bool put : {false, true}) {
      changed_meanwhile(put, sort, [](World &w) { for (auto &offset : w.offsets) offset += 9 << SHIFT; });
      changed_meanwhile(put, sort, [](World &w) { for (auto &offset : w.offsets) offset = -1; });
      changed_meanwhile(put, sort, [](World &w) { for (auto &offset : w.offsets) offset = rand() % OBJECT; });
    }
  }
  gathers(false, false);
  scatters(false, false);
  return 0;
}
