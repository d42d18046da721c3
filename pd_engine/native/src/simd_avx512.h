// Sixteen floats in one AVX512 register. Included inside a variant's own namespace; see kernels.inc.
// The names are those of simd_avx2.h, and the kernels are written on these names alone.

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// The first `count` lanes of x, `other` in the rest; any count, also below 0 and above 16.
inline Vec keep_first(int count, Vec x, Vec other) {
  const __mmask16 kept = count >= kLanes ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
  return _mm512_mask_mov_ps(other, kept, x);
}

// 16 bfloat16, widened.
inline Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// 16 integers of 8 bits.
inline Vec load_whole(const char* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// 16 pairs of bfloat16, taken apart.
inline void load_pairs(const void* p, Vec& even, Vec& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

inline float sum(Vec x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return sum_of_eight(eight);
}

inline float highest(Vec x) { return _mm512_reduce_max_ps(x); }

// x * 2^n for whole n; 0 where that is too small for a float.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec nearest_whole(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
