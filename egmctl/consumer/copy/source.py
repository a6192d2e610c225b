"""The CUDA C++ of the copy kernels, compiled at run time by `egmctl.consumer.copy.kernels`.

Three kernels move bytes: ``egm_table`` (a table of fragments), ``egm_offsets`` (entries at offsets, in the order given)
and ``egm_items`` (entries in page order); two make that order: ``egm_bin`` counts the entries of each 2 MiB page and
``egm_place`` puts each behind the others of its page. All entries pass one bounds check, ``locate``.

A warp takes ``tile`` pieces of work at a time: each lane looks one up, so that the look-ups of a tile overlap, and
groups of 8, 16 or 32 lanes then copy them. Neighbouring tiles run at the same time on neighbouring warps, which is what
keeps the pages in use few when the entries are in page order. Lanes are laid on the 128-byte lines of the DRAM side, so
that a line crosses the link in one request.
"""

__all__ = ["ENTRY_POINTS", "SOURCE"]

ENTRY_POINTS = ("egm_table", "egm_offsets", "egm_items", "egm_bin", "egm_place", "egm_sort")

SOURCE = r"""
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef EGM_UNROLL
#define EGM_UNROLL 4
#endif
#ifndef EGM_LINE
#define EGM_LINE 128
#endif
#define EGM_KIBS 2048  // in a page of 2 MiB

struct TableJob {          // table: count x {dst, src, nbytes}
  u64 table, count, pieces, piece_bytes;
  u32 put, group, tile, unused;
};

struct Space { u64 base, nbytes; };
struct Item { u64 remote, index; };

struct EntryJob {
  u64 offsets;             // count offsets in bytes, of offset_width bytes each, signed
  u64 objects;             // count space numbers, of object_width bytes each; 0: all in `only`
  u64 spaces, space_count; // Space[space_count], read when objects is given
  Space only;
  u64 dense, count, entry_bytes, pieces, piece_bytes;
  u64 bad_index;           // device word, ~0 until an entry is bad: then the lowest one
  u64 bad_flag;            // host word, 0 until an entry is bad
  u64 counts, starts;      // u32[bins + 1] each; counts is zero before and after egm_bin
  u64 ranks, items, sorted; // u32[count], Item[count], Item[count] or 0
  u32 bins, page_shift;    // bins is a power of two
  u32 offset_width, object_width;
  u32 put, group, tile, unused;
};

struct Move { u64 dst, src, nbytes; };

// ---- copying ------------------------------------------------------------------------------------------------------

template <class V> __device__ __forceinline__ V load(u64 p) { return *reinterpret_cast<const V *>(p); }
template <> __device__ __forceinline__ uint4 load<uint4>(u64 p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
template <class V> __device__ __forceinline__ void store(u64 p, V v) { *reinterpret_cast<V *>(p) = v; }

template <class V> __device__ __forceinline__ void copy_as(u64 dst, u64 src, u64 nbytes, u32 put, u32 lane, u32 lanes) {
  u64 head = (0 - dst) & (sizeof(V) - 1);
  if (head > nbytes) head = nbytes;
  const u64 units = (nbytes - head) / sizeof(V);
  const u64 tail = head + units * sizeof(V);
  for (u64 i = lane; i < head; i += lanes) store<u8>(dst + i, load<u8>(src + i));
  const u64 d = dst + head, s = src + head;
  const u64 skip = ((put ? d : s) & (EGM_LINE - 1)) / sizeof(V);
  for (u64 first = lane; first < units + skip; first += (u64)lanes * EGM_UNROLL) {
    V v[EGM_UNROLL];
#pragma unroll
    for (int k = 0; k < EGM_UNROLL; ++k) {
      const u64 i = first + (u64)k * lanes;
      if (i >= skip && i < units + skip) v[k] = load<V>(s + (i - skip) * sizeof(V));
    }
#pragma unroll
    for (int k = 0; k < EGM_UNROLL; ++k) {
      const u64 i = first + (u64)k * lanes;
      if (i >= skip && i < units + skip) store<V>(d + (i - skip) * sizeof(V), v[k]);
    }
  }
  for (u64 i = tail + lane; i < nbytes; i += lanes) store<u8>(dst + i, load<u8>(src + i));
}

__device__ __forceinline__ void copy(const Move m, u32 put, u32 lane, u32 lanes) {
  const u32 phase = (u32)(m.dst ^ m.src) & 15;  // what the two sides can never agree on
  if (phase == 0) copy_as<uint4>(m.dst, m.src, m.nbytes, put, lane, lanes);
  else if ((phase & 7) == 0) copy_as<u64>(m.dst, m.src, m.nbytes, put, lane, lanes);
  else if ((phase & 3) == 0) copy_as<u32>(m.dst, m.src, m.nbytes, put, lane, lanes);
  else if ((phase & 1) == 0) copy_as<u16>(m.dst, m.src, m.nbytes, put, lane, lanes);
  else copy_as<u8>(m.dst, m.src, m.nbytes, put, lane, lanes);
}

template <class Resolve>
__device__ __forceinline__ void move_all(u64 work, u32 put, u32 group, u32 tile, Resolve resolve) {
  const u32 lane = threadIdx.x & 31;
  const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
  const u64 tiles = (work + tile - 1) / tile;
  // neighbouring tiles go to different blocks: few entries are spread over all SMs
  for (u64 t = (u64)(threadIdx.x / 32) * gridDim.x + blockIdx.x; t < tiles; t += warps) {
    const u64 w = t * tile + lane;
    Move mine = {0, 0, 0};
    if (lane < tile && w < work) mine = resolve(w);
    for (u32 e = 0; e < tile; e += 32 / group) {
      const u32 from = e + lane / group;
      Move m;
      m.dst = __shfl_sync(0xffffffffu, mine.dst, from);
      m.src = __shfl_sync(0xffffffffu, mine.src, from);
      m.nbytes = __shfl_sync(0xffffffffu, mine.nbytes, from);
      if (m.nbytes) copy(m, put, lane % group, group);
    }
  }
}

__device__ __forceinline__ Move piece(u64 dst, u64 src, u64 nbytes, u64 number, u64 piece_bytes) {
  const u64 begin = number * piece_bytes;
  if (begin >= nbytes) return {0, 0, 0};
  const u64 rest = nbytes - begin;
  return {dst + begin, src + begin, rest < piece_bytes ? rest : piece_bytes};
}

extern "C" __global__ void egm_table(const TableJob job) {
  const u64 *table = reinterpret_cast<const u64 *>(job.table);
  move_all(job.count * job.pieces, job.put, job.group, job.tile, [&](u64 w) {
    const u64 *row = table + (job.pieces == 1 ? w : w / job.pieces) * 3;
    return piece(row[0], row[1], row[2], job.pieces == 1 ? 0 : w % job.pieces, job.piece_bytes);
  });
}

// ---- entries ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ i64 number(u64 array, u64 index, u32 width) {
  return width == 8 ? reinterpret_cast<const i64 *>(array)[index] : (i64) reinterpret_cast<const int *>(array)[index];
}

// The address of entry `index`, or 0 when it would leave its space; the only place that makes one.
__device__ __forceinline__ u64 locate(const EntryJob &job, u64 index) {
  const i64 offset = number(job.offsets, index, job.offset_width);
  Space space = job.only;
  bool good = true;
  if (job.objects) {
    const i64 object = number(job.objects, index, job.object_width);
    good = object >= 0 && (u64)object < job.space_count;
    if (good) space = reinterpret_cast<const Space *>(job.spaces)[object];
  }
  good = good && offset >= 0 && space.nbytes >= job.entry_bytes && (u64)offset <= space.nbytes - job.entry_bytes;
  if (good) return space.base + (u64)offset;
  atomicMin(reinterpret_cast<u64 *>(job.bad_index), index);
  *reinterpret_cast<volatile u32 *>(job.bad_flag) = 1;
  return 0;
}

__device__ __forceinline__ Move entry(const EntryJob &job, u64 remote, u64 index, u64 number) {
  if (!remote) return {0, 0, 0};
  const u64 dense = job.dense + index * job.entry_bytes;
  return piece(job.put ? remote : dense, job.put ? dense : remote, job.entry_bytes, number, job.piece_bytes);
}

extern "C" __global__ void egm_offsets(const EntryJob job) {
  move_all(job.count * job.pieces, job.put, job.group, job.tile, [&](u64 w) {
    const u64 index = job.pieces == 1 ? w : w / job.pieces;
    return entry(job, locate(job, index), index, job.pieces == 1 ? 0 : w % job.pieces);
  });
}

extern "C" __global__ void egm_items(const EntryJob job) {
  const u64 good = reinterpret_cast<const u32 *>(job.starts)[job.bins];
  const Item *items = reinterpret_cast<const Item *>(job.sorted ? job.sorted : job.items);
  move_all(good * job.pieces, job.put, job.group, job.tile, [&](u64 w) {
    const Item item = items[job.pieces == 1 ? w : w / job.pieces];
    return entry(job, item.remote, item.index, job.pieces == 1 ? 0 : w % job.pieces);
  });
}

// ---- page order: pages that share a bin are few, since bins cover 16 GiB before they repeat -----------------------

#define EGM_BAD 0xffffffffu

// The sum of `mine` over the threads of the block before this one.
__device__ __forceinline__ u32 before_me(u32 mine) {
  __shared__ u32 sums[32];
  const u32 lane = threadIdx.x & 31;
  u32 upto = mine;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) sums[threadIdx.x / 32] = upto;
  __syncthreads();
  if (threadIdx.x < 32) {
    u32 sum = threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0;
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  const u32 result = upto - mine + (threadIdx.x >= 32 ? sums[threadIdx.x / 32 - 1] : 0);
  __syncthreads();
  return result;
}

extern "C" __global__ void egm_bin(const EntryJob job) {
  u32 *counts = reinterpret_cast<u32 *>(job.counts);
  u32 *ranks = reinterpret_cast<u32 *>(job.ranks);
  Item *items = reinterpret_cast<Item *>(job.items);
  const u64 threads = (u64)gridDim.x * blockDim.x;
  const u32 lane = threadIdx.x & 31;
  for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x - lane; first < job.count; first += threads) {
    const u64 i = first + lane;
    const u64 remote = i < job.count ? locate(job, i) : 0;
    const u32 bin = remote ? (u32)(remote >> job.page_shift) & (job.bins - 1) : EGM_BAD;
    // entries of one page often come together (sorted offsets): one atomic for all of a warp's
    const u32 peers = __match_any_sync(0xffffffffu, bin);
    const u32 leader = __ffs(peers) - 1;
    u32 base = 0;
    if (bin != EGM_BAD && lane == leader) base = atomicAdd(counts + bin, (u32)__popc(peers));
    base = __shfl_sync(0xffffffffu, base, leader);
    if (i < job.count) {
      ranks[i] = bin == EGM_BAD ? EGM_BAD : base + __popc(peers & ((1u << lane) - 1));
      items[i] = {0, 0};  // an earlier gather's, should egm_place leave it out: offsets may change meanwhile
    }
  }
  // the last block to arrive sums up, and leaves counts as it found them: zero
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counts + job.bins, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  u32 *starts = reinterpret_cast<u32 *>(job.starts);
  const u32 each = (job.bins + blockDim.x - 1) / blockDim.x;
  const u32 begin = threadIdx.x * each;
  u32 mine = 0;
  for (u32 k = begin; k < begin + each && k < job.bins; ++k) mine += __ldcg(counts + k);
  u32 start = before_me(mine);
  for (u32 k = begin; k < begin + each && k < job.bins; ++k) {
    const u32 n = __ldcg(counts + k);
    starts[k] = start;
    start += n;
    counts[k] = 0;
  }
  if (threadIdx.x == blockDim.x - 1) {
    starts[job.bins] = start;
    counts[job.bins] = 0;
  }
}

extern "C" __global__ void egm_place(const EntryJob job) {
  const u32 *starts = reinterpret_cast<const u32 *>(job.starts);
  const u32 *ranks = reinterpret_cast<const u32 *>(job.ranks);
  Item *items = reinterpret_cast<Item *>(job.items);
  const u64 threads = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += threads) {
    const u32 rank = ranks[i];
    if (rank == EGM_BAD) continue;
    const u64 remote = locate(job, i);
    const u64 place = (u64)starts[(u32)(remote >> job.page_shift) & (job.bins - 1)] + rank;
    // offsets that somebody changes meanwhile must not lead out of the array; what they leave unwritten is zero
    if (remote && place < job.count) items[place] = {remote, i};
  }
}

// Within a page by KiB, so that neighbours are written together and share the lines that neither fills.
extern "C" __global__ void egm_sort(const EntryJob job) {
  __shared__ u32 places[EGM_KIBS];
  const u32 *starts = reinterpret_cast<const u32 *>(job.starts);
  const Item *items = reinterpret_cast<const Item *>(job.items);
  Item *sorted = reinterpret_cast<Item *>(job.sorted);
  const u32 each = EGM_KIBS / blockDim.x;
  for (u32 bin = blockIdx.x; bin < job.bins; bin += gridDim.x) {
    const u32 start = starts[bin], end = starts[bin + 1];
    if (start == end) continue;
    for (u32 k = threadIdx.x; k < EGM_KIBS; k += blockDim.x) places[k] = 0;
    __syncthreads();
    for (u32 i = start + threadIdx.x; i < end; i += blockDim.x)
      atomicAdd(places + ((items[i].remote >> 10) & (EGM_KIBS - 1)), 1u);
    __syncthreads();
    u32 mine = 0;
    for (u32 k = 0; k < each; ++k) mine += places[threadIdx.x * each + k];
    u32 place = before_me(mine);
    for (u32 k = 0; k < each; ++k) {
      const u32 n = places[threadIdx.x * each + k];
      places[threadIdx.x * each + k] = place;
      place += n;
    }
    __syncthreads();
    for (u32 i = start + threadIdx.x; i < end; i += blockDim.x) {
      const Item item = items[i];
      sorted[start + atomicAdd(places + ((item.remote >> 10) & (EGM_KIBS - 1)), 1u)] = item;
    }
    __syncthreads();
  }
}
"""
