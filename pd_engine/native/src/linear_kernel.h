// One kernel for every number of rows. Included inside a variant's own namespace; see kernels.inc.
//
// A tile is up to kLinearRows rows by the 32 outputs of a panel, in registers; it walks the depth once, from the first
// step to the last. So a row's result is one fixed sum, whatever the tile it stands in.

// Where a tile fetches the next panel from while it computes, so that the memory works while the registers do.
struct Ahead {
  const char* next;
  int64_t bytes_a_step;
  int64_t second;  // a second line to fetch, where a step has two
};

template <class A>
inline void finish_linear(const LinearCall& call, int64_t row, int64_t panel, Vec left, Vec right) {
  if (call.scales != nullptr) {
    left = mul(left, load(call.scales + panel * kPanelOutputs));
    right = mul(right, load(call.scales + panel * kPanelOutputs + kLanes));
  }
  if (call.bias != nullptr) {
    left = add(left, load(call.bias + panel * kPanelOutputs));
    right = add(right, load(call.bias + panel * kPanelOutputs + kLanes));
  }
  if (call.epilogue == Epilogue::kSiluMultiply) {
    using Act = typename A::Act;
    Act* out = static_cast<Act*>(call.out) + row * (call.outputs / 2) + panel * kLanes;
    A::store_act(out, mul(silu(left), right));
    return;
  }
  float* out = static_cast<float*>(call.out) + row * call.outputs + panel * kPanelOutputs;
  const int64_t num_outputs = call.outputs - panel * kPanelOutputs;
  if (num_outputs >= kPanelOutputs) {
    store(out, call.epilogue == Epilogue::kAdd ? add(left, load(out)) : left);
    store(out + kLanes, call.epilogue == Epilogue::kAdd ? add(right, load(out + kLanes)) : right);
    return;
  }
  float results[kPanelOutputs];  // the last panel, partly filled
  store(results, left);
  store(results + kLanes, right);
  for (int64_t i = 0; i < num_outputs; ++i) out[i] = call.epilogue == Epilogue::kAdd ? results[i] + out[i] : results[i];
}

template <class A, class W, int kRows, bool kFetch>
inline void linear_tile(const LinearCall& call, const char* weights, int64_t row, int64_t panel, const Ahead& ahead) {
  const int64_t num_steps = call.depth / A::kPack;
  const typename A::Act* x = static_cast<const typename A::Act*>(call.x) + row * call.depth;
  const char* next = ahead.next;

  Vec sums[kRows][2];
  KVN_UNROLL
  for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = zero();
  for (int64_t step = 0; step < num_steps; ++step, weights += W::kBytes) {
    typename A::Steps left, right;
    W::load(weights, left, right);
    if constexpr (kFetch) {
      _mm_prefetch(next, _MM_HINT_T1);
      _mm_prefetch(next + ahead.second, _MM_HINT_T1);
      next += ahead.bytes_a_step;
    }
    KVN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const typename A::Input in = A::input(x + i * call.depth, step);
      sums[i][0] = A::multiply(in, left, sums[i][0]);
      sums[i][1] = A::multiply(in, right, sums[i][1]);
    }
  }
  KVN_UNROLL
  for (int i = 0; i < kRows; ++i) finish_linear<A>(call, row + i, panel, sums[i][0], sums[i][1]);
}

// Measured: up to kStreamingRows read weights as fast as the memory gives them, and requests of our own would only
// disturb the processor's. Some more rows compute as long as they read, and gain when all tiles of a panel share in
// fetching the next one. With many rows reading is a small part, and the instructions are better spared.
constexpr int64_t kMostFetchingTiles = 3;

// Rows of the next tile when `left` are left: whole tiles, and the last two of equal height.
inline int rows_of_tile(int64_t left) {
  if (left <= kLinearRows) return static_cast<int>(left);
  if (left < 2 * kLinearRows) return static_cast<int>((left + 1) / 2);
  return kLinearRows;
}

// All tiles of a panel. `ahead` is null when nothing is to be fetched, else it is moved on.
template <class A, class W>
inline void linear_panel(const LinearCall& call, const char* weights, int64_t panel, int64_t row, int64_t row_end,
                         Ahead* ahead) {
  while (row < row_end) {
    const int in_tile = rows_of_tile(row_end - row);
    with_constant<kLinearRows>(in_tile, [&](auto rows) {
      if (ahead != nullptr) {
        linear_tile<A, W, rows.value, true>(call, weights, row, panel, *ahead);
      } else {
        linear_tile<A, W, rows.value, false>(call, weights, row, panel, {});
      }
    });
    if (ahead != nullptr) ahead->next += call.depth / A::kPack * ahead->bytes_a_step;
    row += in_tile;
  }
}

template <class A, class W>
inline void linear_of(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                      int64_t panel_end, char* scratch) {
  const int64_t num_steps = call.depth / A::kPack, panel_bytes = num_steps * W::kBytes;
  const int64_t num_rows = row_end - row_begin, num_tiles = (num_rows + kLinearRows - 1) / kLinearRows;
  const char* weights = call.panels + panel_begin * panel_bytes;
  if constexpr (kWidenTiles > 0 && W::kWidens) {
    // what each of many tiles would widen again is widened once: the same sums, from other memory
    if (num_tiles >= kWidenTiles) {
      for (int64_t panel = panel_begin; panel < panel_end; ++panel, weights += panel_bytes) {
        widen_panel<A, W>(weights, num_steps, scratch);
        linear_panel<Float32, InDtype<Float32>>(call, scratch, panel, row_begin, row_end, nullptr);
      }
      return;
    }
  }
  constexpr int64_t kStreaming = kStreamingRows * W::kBytes / InDtype<A>::kBytes;
  const bool fetch = num_rows > kStreaming && num_tiles <= kMostFetchingTiles;
  Ahead ahead{};
  ahead.bytes_a_step = W::kBytes / num_tiles;
  ahead.second = ahead.bytes_a_step > kStepBytes ? kStepBytes : 0;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel, weights += panel_bytes) {
    ahead.next = weights + panel_bytes;
    linear_panel<A, W>(call, weights, panel, row_begin, row_end, fetch ? &ahead : nullptr);
  }
}

template <class A>
void linear(const LinearCall& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
            char* scratch) {
  if (call.scales != nullptr) {
    linear_of<A, InInt8<A>>(call, row_begin, row_end, panel_begin, panel_end, scratch);
  } else {
    linear_of<A, InDtype<A>>(call, row_begin, row_end, panel_begin, panel_end, scratch);
  }
}
