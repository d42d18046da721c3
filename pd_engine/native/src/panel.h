// The weights of 32 outputs, in the ways that they may be stored. Included inside a variant's own namespace; see
// kernels.inc.
//
// A panel is one step after another; a step has the weights of kPack inputs for all 32 outputs, sixteen on the left and
// sixteen on the right. `kWidens`: loading a step makes float32 of something smaller.

// In the model's dtype: two of the arithmetic's steps, side by side.
template <class A>
struct InDtype {
  static constexpr int kBytes = 2 * kStepBytes;
  static constexpr bool kWidens = sizeof(typename A::Stored) < sizeof(typename A::Act);

  static void load(const char* p, typename A::Steps& left, typename A::Steps& right) {
    left = A::load_step(p);
    right = A::load_step(p + kStepBytes);
  }
};

// In 8 bits, to be scaled behind the sum.
template <class A>
struct InInt8 {
  static constexpr int kBytes = kPanelOutputs * A::kPack;
  static constexpr bool kWidens = sizeof(typename A::Act) == sizeof(float);

  static void load(const char* p, typename A::Steps& left, typename A::Steps& right) { A::load_int8(p, left, right); }
};

template <class A>
void pack_int8(const int8_t* row, int64_t depth, int output, char* panel) {
  for (int64_t i = 0; i < depth; ++i) {
    char* step = panel + i / A::kPack * InInt8<A>::kBytes;
    step[A::int8_place(static_cast<int>(i % A::kPack), output)] = static_cast<char>(A::int8_code(row[i]));
  }
}

// Writes a step as steps of Float32, the same numbers in the same order; returns the end of what it wrote.
inline char* widen_step(const Float32::Steps& left, const Float32::Steps& right, char* out) {
  store(reinterpret_cast<float*>(out), left);
  store(reinterpret_cast<float*>(out) + kLanes, right);
  return out + InDtype<Float32>::kBytes;
}
inline char* widen_step(const WidenedBf16::Steps& left, const WidenedBf16::Steps& right, char* out) {
  return widen_step(left.odd, right.odd, widen_step(left.even, right.even, out));
}

template <class A, class W>
inline void widen_panel(const char* panel, int64_t num_steps, char* out) {
  for (int64_t step = 0; step < num_steps; ++step, panel += W::kBytes) {
    typename A::Steps left, right;
    W::load(panel, left, right);
    out = widen_step(left, right, out);
  }
}
