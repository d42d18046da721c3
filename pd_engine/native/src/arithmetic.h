// How numbers are stored and multiplied, for the kernels to be written once. Included inside a variant's own namespace.
//
// Weights, K and V are all laid out in *steps*: 64 bytes that hold, for 16 outputs (or keys, or columns), the operands
// of one step of a dot product: one float each, or a pair of bfloat16. `kPack` is how many numbers of the dot product
// a step takes. An arithmetic says what the other operand, the activations, looks like (`Act`) and what a step does:
//
//   accumulator[lane] += sum over the pack of act[step * kPack + i] * stored[step][lane][i]
//
// Weights of 8 bits are whole numbers from -127 to 127, which every arithmetic holds exactly: they are made into steps
// as they are read, and the sums are scaled at the end. Where a number stands among the bytes of 32 outputs' step, and
// how it is written there, each arithmetic chooses for itself.

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

  static int int8_place(int, int output) { return output; }
  static int8_t int8_code(int8_t x) { return x; }
  static void load_int8(const char* p, Steps& left, Steps& right) {
    left = load_whole(p);
    right = load_whole(p + kLanes);
  }
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

  static int int8_place(int i, int output) { return i * kPanelOutputs + output; }
  static int8_t int8_code(int8_t x) { return x; }
  static void load_int8(const char* p, Steps& left, Steps& right) {
    left.even = load_whole(p);
    right.even = load_whole(p + kLanes);
    left.odd = load_whole(p + kPanelOutputs);
    right.odd = load_whole(p + kPanelOutputs + kLanes);
  }
};

#ifdef __AVX512BF16__
// The two bytes of the whole numbers 0 .. 127 in bfloat16.
struct WholeBf16 {
  alignas(64) uint8_t low[128] = {};
  alignas(64) uint8_t high[128] = {};

  constexpr WholeBf16() {
    for (int x = 1; x < 128; ++x) {
      int exponent = 0;
      while (x >> (exponent + 1) != 0) ++exponent;
      const int bits = (127 + exponent) << 7 | (x << (7 - exponent) & 0x7f);
      low[x] = static_cast<uint8_t>(bits & 0xff);
      high[x] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr WholeBf16 kWholeBf16;

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

  // Sign and magnitude: 7 bits look both bytes up. Bytes are then paired within 16 bytes, of which the first 8 are of
  // outputs on the left.
  static int int8_place(int i, int output) {
    return output % kLanes / 4 * 16 + output / kLanes * 8 + output % 4 * kPack + i;
  }
  static int8_t int8_code(int8_t x) { return static_cast<int8_t>(x < 0 ? -x | 0x80 : x); }
  static void load_int8(const char* p, Steps& left, Steps& right) {
    const __m512i codes = _mm512_loadu_si512(p);
    const __m512i low = look_up(kWholeBf16.low, codes), magnitude = look_up(kWholeBf16.high, codes);
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), kOrAnd);
    left = _mm512_unpacklo_epi8(low, high);
    right = _mm512_unpackhi_epi8(low, high);
  }

 private:
  static __m512i look_up(const uint8_t* table, __m512i codes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
  }
};
#endif
