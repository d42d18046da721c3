// Kernels that act on each row by itself. Included inside a variant's own namespace; see kernels.inc.

// 1 / sqrt(mean of squares + eps); size is a multiple of 16
inline float inverse_rms(const float* x, int64_t size, float eps) {
  Vec squares = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + eps);
}

template <class A>
void rms_norm(const float* x, const float* weight, void* out, int64_t rows, int64_t size, float eps) {
  using Act = typename A::Act;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * size;
    Act* to = static_cast<Act*>(out) + row * size;
    const Vec scale = splat(inverse_rms(from, size, eps));
    for (int64_t i = 0; i < size; i += kLanes) A::store_act(to + i, mul(mul(load(from + i), scale), load(weight + i)));
  }
}

template <class A>
void embed(const void* stored, float* out, int64_t size) {
  const auto* from = static_cast<const typename A::Stored*>(stored);
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, A::load_stored(from + i));
}

// Rotates one head, normalised first where there is a norm. Products and sums are rounded one by one.
inline void rotate_head(const float* head, const float* norm, const float* cos, const float* sin, int head_dim,
                        float eps, float* out) {
  float normed[kMaxHeadDim];
  if (norm != nullptr) {
    const Vec scale = splat(inverse_rms(head, head_dim, eps));
    for (int i = 0; i < head_dim; i += kLanes) store(normed + i, mul(mul(load(head + i), scale), load(norm + i)));
    head = normed;
  }
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    out[i] = head[i] * cos[i] - head[half + i] * sin[i];
    out[half + i] = head[half + i] * cos[i] + head[i] * sin[i];
  }
}

// Writes one token's K: [head_dim / pack][16 tokens][pack]
template <class A>
inline void write_key(const float* key, int slot, int head_dim, typename A::Stored* block) {
  for (int step = 0; step < head_dim / A::kPack; ++step) {
    for (int i = 0; i < A::kPack; ++i) {
      block[(step * kBlockTokens + slot) * A::kPack + i] = A::to_stored(key[step * A::kPack + i]);
    }
  }
}

// Writes one token's V: [16 tokens / pack][head_dim][pack]
template <class A>
inline void write_value(const float* value, int slot, int head_dim, typename A::Stored* block) {
  typename A::Stored* step = block + slot / A::kPack * head_dim * A::kPack + slot % A::kPack;
  for (int i = 0; i < head_dim; ++i) step[i * A::kPack] = A::to_stored(value[i]);
}

template <class A>
void rope(const RopeCall& call, int64_t row_begin, int64_t row_end) {
  using Act = typename A::Act;
  using Stored = typename A::Stored;
  const int head_dim = call.head_dim;
  const int64_t width = static_cast<int64_t>(call.num_heads + 2 * call.num_kv_heads) * head_dim;
  const int64_t stored_head = static_cast<int64_t>(kBlockTokens) * head_dim;  // numbers of one head's K, or V
  float rotated[kMaxHeadDim];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int position = call.positions[row];
    const float* cos = call.cos + static_cast<int64_t>(position) * (head_dim / 2);
    const float* sin = call.sin + static_cast<int64_t>(position) * (head_dim / 2);
    const float* head = call.qkv + row * width;
    Act* query = static_cast<Act*>(call.queries) + row * call.num_heads * head_dim;
    for (int h = 0; h < call.num_heads; ++h, head += head_dim, query += head_dim) {
      rotate_head(head, call.query_norm, cos, sin, head_dim, call.eps, rotated);
      for (int i = 0; i < head_dim; i += kLanes) A::store_act(query + i, load(rotated + i));
    }
    const float* value = head + call.num_kv_heads * head_dim;
    Stored* stored = reinterpret_cast<Stored*>(call.layer + call.blocks[row] * call.block_bytes);
    const int slot = position % kBlockTokens;
    for (int h = 0; h < call.num_kv_heads; ++h, head += head_dim, value += head_dim, stored += 2 * stored_head) {
      rotate_head(head, call.key_norm, cos, sin, head_dim, call.eps, rotated);
      write_key<A>(rotated, slot, head_dim, stored);
      write_value<A>(value, slot, head_dim, stored + stored_head);
    }
  }
}
