// What a program reaches at most that reads a block of one array or of two, joins all of it and writes as
// much as one: the least that a gradient of whole rows does. A thread keeps R pieces of 16 bytes of each in
// registers and S in shared memory, where they arrive by asynchronous copies of its own, or all by one bulk
// copy; or a cluster of programs has a block, joins it through shared memory and keeps it in registers.
// KEPT: the second cache is told to keep for longest what is read (but not of asynchronous copies:
// there the assembler of CUDA 12.9 and 13.0 makes an instruction that the card refuses). See ceilings.py.

#include <cstdint>
#include <cuda_runtime.h>

__device__ __forceinline__ uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float sum(float4 v) { return v.x + v.y + v.z + v.w; }

__device__ __forceinline__ float4 times(float4 v, float k) {
  return make_float4(v.x * k, v.y * k, v.z * k, v.w * k);
}

// A factor that all elements of the block decide, near 1.
template <int THREADS>
__device__ __forceinline__ float joined(float s) {
  __shared__ float warps[THREADS / 32];
  for (int far = 16; far; far /= 2) s += __shfl_xor_sync(~0u, s, far);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
  __syncthreads();
  float all = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) all += warps[i];
  return 1.0f + 1e-9f * all;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void ask(float4* kept, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(kept)), "l"(from));
}

__device__ __forceinline__ uint64_t kept_longest() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <bool KEPT>
__device__ __forceinline__ float4 load(const float4* from, uint64_t policy) {
  if (!KEPT) return *from;
  float4 v;
  asm volatile("ld.global.nc.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

template <int THREADS, int R, int S, bool TWO, bool KEPT>
__global__ void __launch_bounds__(THREADS)
    by_threads(const float4* __restrict__ x, const float4* __restrict__ y, float4* __restrict__ out) {
  extern __shared__ float4 kept[];
  float4* beside = kept + S * THREADS;
  const int t = threadIdx.x;
  const size_t begin = static_cast<size_t>(blockIdx.x) * THREADS * (R + S) + t;
  const uint64_t policy = KEPT ? kept_longest() : 0;
  float4 own[R > 0 ? R : 1], other[R > 0 ? R : 1];
#pragma unroll
  for (int i = 0; i < R; i++) {
    own[i] = load<KEPT>(x + begin + i * THREADS, policy);
    if (TWO) other[i] = load<KEPT>(y + begin + i * THREADS, policy);
  }
#pragma unroll
  for (int i = 0; i < S; i++) {
    ask(kept + i * THREADS + t, x + begin + (R + i) * THREADS);
    if (TWO) ask(beside + i * THREADS + t, y + begin + (R + i) * THREADS);
  }
  float s = 0;
#pragma unroll
  for (int i = 0; i < R; i++) {
    if (TWO) s += sum(other[i]);
    s += sum(own[i]);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 4
  for (int i = 0; i < S; i++) {
    if (TWO) s += sum(beside[i * THREADS + t]);
    s += sum(kept[i * THREADS + t]);
  }
  const float k = joined<THREADS>(s);
#pragma unroll
  for (int i = 0; i < R; i++) out[begin + i * THREADS] = times(TWO ? plus(own[i], other[i]) : own[i], k);
#pragma unroll 4
  for (int i = 0; i < S; i++) {
    const float4 one = kept[i * THREADS + t];
    out[begin + (R + i) * THREADS] = times(TWO ? plus(one, beside[i * THREADS + t]) : one, k);
  }
}

template <int THREADS, int S>
__global__ void __launch_bounds__(THREADS)
    by_bulk(const float4* __restrict__ x, const float4*, float4* __restrict__ out) {
  extern __shared__ __align__(128) float4 kept[];
  __shared__ uint64_t arrived;
  constexpr int BYTES = THREADS * S * 16, PIECE = BYTES > 16384 ? 16384 : BYTES;
  const int t = threadIdx.x;
  const size_t begin = static_cast<size_t>(blockIdx.x) * THREADS * S;
  if (t == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&arrived)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&arrived)), "r"(BYTES)
                 : "memory");
    const uint64_t policy = kept_longest();
    for (int at = 0; at < BYTES; at += PIECE)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
              "r"(address(kept) + at),
          "l"(reinterpret_cast<const char*>(x + begin) + at), "r"(PIECE), "r"(address(&arrived)), "l"(policy)
          : "memory");
  }
  __syncthreads();
  uint32_t done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(address(&arrived))
                 : "memory");
  float s = 0;
#pragma unroll 8
  for (int i = 0; i < S; i++) s += sum(kept[i * THREADS + t]);
  const float k = joined<THREADS>(s);
#pragma unroll 8
  for (int i = 0; i < S; i++) out[begin + i * THREADS + t] = times(kept[i * THREADS + t], k);
}

// A cluster of C programs has a block: each tells all others its sum, which goes from one shared memory
// to the other.
template <int C, int THREADS, int R, bool TWO>
__global__ void __launch_bounds__(THREADS)
    by_cluster(const float4* __restrict__ x, const float4* __restrict__ y, float4* __restrict__ out) {
  __shared__ float told[C];
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  const int t = threadIdx.x;
  const size_t begin = static_cast<size_t>(blockIdx.x) * THREADS * R + t;
  const uint64_t policy = kept_longest();
  float4 own[R], other[R];
#pragma unroll
  for (int i = 0; i < R; i++) {
    own[i] = load<true>(x + begin + i * THREADS, policy);
    if (TWO) other[i] = load<true>(y + begin + i * THREADS, policy);
  }
  float s = 0;
#pragma unroll
  for (int i = 0; i < R; i++) {
    if (TWO) s += sum(other[i]);
    s += sum(own[i]);
  }
  float k = joined<THREADS>(s);
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (t < C) {
    uint32_t rank, there;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(told + rank)), "r"(t));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(k) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  k = 0;
#pragma unroll
  for (int i = 0; i < C; i++) k += told[i] / C;
#pragma unroll
  for (int i = 0; i < R; i++) out[begin + i * THREADS] = times(TWO ? plus(own[i], other[i]) : own[i], k);
}

__global__ void nothing(const float4*, const float4*, float4*) {}

struct Way {
  const char* name;
  const void* kernel;
  int threads, bytes, shared, inputs, cluster;
};

#define WAY(T, R, S, TWO, KEPT, TOLD)                                                              \
  {#T " threads, " #R " registers, " #S " shared" TOLD, (const void*)by_threads<T, R, S, TWO, KEPT>, \
   T, T*(R + S) * 16, (TWO ? 2 : 1) * T * S * 16, TWO ? 2 : 1, 1}
#define REGISTERS(T, R, TWO) WAY(T, R, 0, TWO, false, ""), WAY(T, R, 0, TWO, true, ", kept")
#define OF_ONE(T, R) REGISTERS(T, R, false)
#define OF_TWO(T, R) REGISTERS(T, R, true)
#define SHARED(T, R, S) WAY(T, R, S, false, false, "")
#define SHARED_OF_TWO(T, R, S) WAY(T, R, S, true, false, "")
#define BULK(T, S) {#T " threads, bulk, kept", (const void*)by_bulk<T, S>, T, T* S * 16, T* S * 16, 1, 1}
#define CLUSTER(C, T, R, TWO)                                                                \
  {"cluster of " #C ", " #T " threads, " #R " registers, kept", (const void*)by_cluster<C, T, R, TWO>, \
   T, T* R * 16, 0, TWO ? 2 : 1, C}

static const Way ways[] = {
    {"nothing", (const void*)nothing, 32, 0, 0, 0, 1},
    // 128, 64, 32, 16, 8, 4 and 2 KiB of one array
    OF_ONE(1024, 8), OF_ONE(512, 16), SHARED(512, 8, 8), SHARED(256, 8, 24), SHARED(512, 4, 12), BULK(512, 16),
    OF_ONE(1024, 4), OF_ONE(512, 8), OF_ONE(256, 16), SHARED(512, 4, 4), SHARED(256, 4, 12), BULK(512, 8),
    OF_ONE(1024, 2), OF_ONE(512, 4), OF_ONE(256, 8), OF_ONE(128, 16), SHARED(256, 4, 4), BULK(128, 16),
    OF_ONE(512, 2), OF_ONE(256, 4), OF_ONE(128, 8), SHARED(128, 0, 8), BULK(128, 8),
    OF_ONE(256, 2), OF_ONE(128, 4), OF_ONE(64, 8), BULK(128, 4),
    OF_ONE(128, 2), OF_ONE(64, 4), OF_ONE(32, 8),
    OF_ONE(128, 1), OF_ONE(64, 2), OF_ONE(32, 4),
    // 64, 16, 4 and 2 KiB of each of two
    OF_TWO(1024, 4), OF_TWO(512, 8), SHARED_OF_TWO(512, 4, 4), SHARED_OF_TWO(512, 2, 6), SHARED_OF_TWO(256, 4, 12),
    OF_TWO(512, 2), OF_TWO(256, 4), OF_TWO(128, 8), SHARED_OF_TWO(128, 4, 4),
    OF_TWO(256, 1), OF_TWO(128, 2), OF_TWO(64, 4),
    OF_TWO(128, 1), OF_TWO(64, 2), OF_TWO(32, 4),
    // the same by clusters: 64, 128 and 256 KiB of one, then of each of two
    CLUSTER(2, 512, 4, false), CLUSTER(2, 256, 8, false), CLUSTER(4, 128, 8, false),
    CLUSTER(2, 256, 16, false), CLUSTER(4, 256, 8, false), CLUSTER(8, 128, 16, false), CLUSTER(8, 256, 8, false),
    CLUSTER(2, 512, 4, true), CLUSTER(2, 256, 8, true), CLUSTER(4, 128, 8, true),
    CLUSTER(4, 256, 8, true), CLUSTER(8, 128, 8, true), CLUSTER(8, 128, 16, true),
};

extern "C" {
int way_count() { return sizeof(ways) / sizeof(Way); }
const char* way_name(int i) { return ways[i].name; }
int way_bytes(int i) { return ways[i].bytes * ways[i].cluster; }
int way_inputs(int i) { return ways[i].inputs; }
int way_prepare(int i) {
  return cudaFuncSetAttribute(ways[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ways[i].shared);
}
int way_launch(int i, const void* x, const void* y, void* out, size_t bytes, void* stream) {
  const Way& way = ways[i];
  void* arguments[] = {&x, &y, &out};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(way.bytes ? bytes / way.bytes : 1);
  config.blockDim = dim3(way.threads);
  config.dynamicSmemBytes = way.shared;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(way.cluster), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = way.cluster > 1;
  return cudaLaunchKernelExC(&config, way.kernel, arguments);
}
}
