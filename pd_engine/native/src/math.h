// Arithmetic on sixteen floats that kernels share. Included inside a variant's own namespace; see kernels.inc.

// 2^x for x <= 0 and a little above; exactly 1 at 0, exactly 0 far below. Error below 1.6e-7 of the result.
inline Vec power_of_two(Vec x) {
  const Vec whole = nearest_whole(x);
  const Vec rest = sub(x, whole);  // -0.5 .. 0.5
  Vec p = splat(0x1.5bba12p-10f);
  p = fma(p, rest, splat(0x1.3cea88p-7f));
  p = fma(p, rest, splat(0x1.c6b752p-5f));
  p = fma(p, rest, splat(0x1.ebf9bcp-3f));
  p = fma(p, rest, splat(0x1.62e42ap-1f));
  p = fma(p, rest, splat(1.0f));
  return scale_by_power(p, whole);
}

// x * sigmoid(x)
inline Vec silu(Vec x) {
  const Vec bounded = max(splat(-87.0f), x);  // below, 2^(...) would leave the floats; a NaN stays one
  const Vec decay = power_of_two(mul(bounded, splat(-0x1.715476p+0f)));
  return div(bounded, add(decay, splat(1.0f)));
}

inline float widen_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Nearest, ties to even; a NaN stays one.
inline uint16_t round_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40 : rounded);
}
