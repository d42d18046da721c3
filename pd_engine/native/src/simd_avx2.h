// Sixteen floats in two AVX2 registers, under the names of simd_avx512.h. Every operation gives a lane the bits that
// AVX512 gives it (save for results of 2^n below the smallest normal float), and sums run in the same order.

struct Vec {
  __m256 low, high;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec splat(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline Vec keep_first(int count, Vec x, Vec other) {
  const __m256i edge = _mm256_set1_epi32(count);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(edge, lanes));
  const __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(edge, _mm256_add_epi32(lanes, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(other.low, x.low, low), _mm256_blendv_ps(other.high, x.high, high)};
}

inline __m256 widen_eight(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_bf16(const uint16_t* p) { return {widen_eight(p), widen_eight(p + 8)}; }

inline __m256 eight_whole(const char* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_whole(const char* p) { return {eight_whole(p), eight_whole(p + 8)}; }

inline void load_pairs(const void* p, Vec& even, Vec& odd) {
  const __m256i* pairs = static_cast<const __m256i*>(p);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m256i first = _mm256_loadu_si256(pairs), second = _mm256_loadu_si256(pairs + 1);
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(second, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(first, upper)), _mm256_castsi256_ps(_mm256_and_si256(second, upper))};
}

inline float sum(Vec x) { return sum_of_eight(_mm256_add_ps(x.low, x.high)); }

inline float highest(Vec x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

inline __m256 scale_eight(__m256 x, __m256 n) {
  // the exponent's bits of 2^n; at -127 they are all 0, and so is the product
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
inline Vec scale_by_power(Vec x, Vec n) {
  const Vec kept = max(n, splat(-127.0f));
  return {scale_eight(x.low, kept.low), scale_eight(x.high, kept.high)};
}
inline Vec nearest_whole(Vec x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}
