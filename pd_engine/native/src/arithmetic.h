// How numbers are stored and multiplied, for the kernels to be written once. Included inside a variant's own namespace.
//
// Weights, K and V are all laid out in *steps*: 64 bytes that hold, for 16 outputs (or keys, or columns), the operands
// of one step of a dot product: one float each, or a pair of bfloat16. `kPack` is how many numbers of the dot product
// a step takes. An arithmetic says what the other operand, the activations, looks like (`Act`) and what a step does:
//
//   accumulator[lane] += sum over the pack of act[step * kPack + i] * stored[step][lane][i]

struct Float32 {
  using Stored = float;
  using Act = float;
  using Steps = Vec;  // a loaded step
  using Input = Vec;  // kPack activations, the same for all lanes
  static constexpr int kPack = 1;

  static Steps load_step(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  static Input input(const Act* act, int64_t step) { return splat(act[step]); }
  static Vec multiply(Input in, Steps stored, Vec accumulator) { return fma(in, stored, accumulator); }
  static void store_act(Act* p, Vec x) { store(p, x); }
  static Vec load_stored(const Stored* p) { return load(p); }
  static Stored to_stored(float x) { return x; }
};

// bfloat16 in memory, float32 in every product and every activation.
struct WidenedBf16 {
  struct Pair {
    Vec even, odd;
  };
  using Stored = uint16_t;
  using Act = float;
  using Steps = Pair;
  using Input = Pair;
  static constexpr int kPack = 2;

  static Steps load_step(const char* p) {
    Pair pair;
    load_pairs(p, pair.even, pair.odd);
    return pair;
  }
  static Input input(const Act* act, int64_t step) { return {splat(act[2 * step]), splat(act[2 * step + 1])}; }
  static Vec multiply(const Input& in, const Steps& stored, Vec accumulator) {
    return fma(in.odd, stored.odd, fma(in.even, stored.even, accumulator));
  }
  static void store_act(Act* p, Vec x) { store(p, x); }
  static Vec load_stored(const Stored* p) { return load_bf16(p); }
  static Stored to_stored(float x) { return round_to_bf16(x); }
};

#ifdef __AVX512BF16__
// bfloat16 in memory and in the activations; the processor's own dot product of pairs, summed in float32.
struct PairDotBf16 {
  using Stored = uint16_t;
  using Act = uint16_t;
  using Steps = __m512i;
  using Input = __m512i;
  static constexpr int kPack = 2;

  static Steps load_step(const char* p) { return _mm512_loadu_si512(p); }
  static Input input(const Act* act, int64_t step) {
    int32_t pair;
    memcpy(&pair, act + 2 * step, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static Vec multiply(Input in, Steps stored, Vec accumulator) {
    return _mm512_dpbf16_ps(accumulator, reinterpret_cast<__m512bh>(in), reinterpret_cast<__m512bh>(stored));
  }
  static void store_act(Act* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  static Vec load_stored(const Stored* p) { return load_bf16(p); }
  static Stored to_stored(float x) { return round_to_bf16(x); }
};
#endif
