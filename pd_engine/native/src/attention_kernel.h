// Paged attention. Included inside a variant's own namespace; see kernels.inc.
//
// keys:   0 ........ 64 ....... 128 ...      ... 512 ...
//         |-- tile --|-- tile --|               |-- the next split
//         one softmax update a tile             partial results merged, in order
//
// Tiles and splits stand at absolute positions, and whatever a row does not see counts as weight 0. So what a row
// adds up, and in which order, depends on its position alone: not on the rows beside it, and not on who computes which
// split.

// A row and head on its way through the tiles.
template <class A>
struct QueryRow {
  const typename A::Act* query;
  float* state;
  int visible;  // keys 0 .. visible - 1
};

// One KV head's K and V of up to four blocks. Behind the last block, K repeats it (and is masked).
struct KvTile {
  const char* keys[kTileBlocks];
  const char* values[kTileBlocks];
  int num_blocks;
  int first_key;
};

// Fetches the tile after this one, a few lines with every step of this one, in the order of their addresses.
struct Fetch {
  const char* blocks[kTileBlocks];
  int64_t bytes;  // of a block: K and V of all heads of the item
  const char* at;
  const char* end;
  int block;

  void begin() {
    block = 0;
    at = blocks[0];
    end = at + bytes;
  }
  void lines(int count) {
    for (int i = 0; i < count; ++i) _mm_prefetch(at + i * kStepBytes, _MM_HINT_T1);
    at += count * kStepBytes;
    if (at < end) return;
    block = smaller(block + 1, kTileBlocks - 1);
    at = blocks[block];
    end = at + bytes;
  }
  // The very first tile has none before it.
  void all() {
    begin();
    for (int64_t i = 0; i < kTileBlocks * bytes; i += kStepBytes) lines(1);
  }
};

inline void reset_state(float* state, int head_dim) {
  state[kStateHighest] = kHidden;
  for (int i = kStateSums; i < kStateValues + head_dim; i += kLanes) store(state + i, zero());
}

// Scores of kRows rows with 64 keys, not yet scaled: one sum over head_dim a key, from the first step to the last.
template <class A, int kRows, bool kFetch>
inline void score_tile(const QueryRow<A>* rows, const KvTile& tile, int num_steps, Fetch& fetch,
                       Vec (&scores)[kRows][kTileBlocks]) {
  KVN_UNROLL
  for (int first = 0; first < kTileBlocks; first += kScoreBlocks) {
    KVN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      KVN_UNROLL
      for (int j = 0; j < kScoreBlocks; ++j) scores[i][first + j] = zero();
    }
    for (int64_t step = 0; step < num_steps; ++step) {
      typename A::Steps keys[kScoreBlocks];
      KVN_UNROLL
      for (int j = 0; j < kScoreBlocks; ++j) keys[j] = A::load_step(tile.keys[first + j] + step * kStepBytes);
      if constexpr (kFetch) fetch.lines(kScoreBlocks);
      KVN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const typename A::Input in = A::input(rows[i].query, step);
        KVN_UNROLL
        for (int j = 0; j < kScoreBlocks; ++j) scores[i][first + j] = A::multiply(in, keys[j], scores[i][first + j]);
      }
    }
  }
}

// Turns scores into weights relative to each row's highest score so far; `decay` is what older results shrink by.
template <class A, int kRows>
inline void update_softmax(const QueryRow<A>* rows, const KvTile& tile, float scale_log2e,
                           Vec (&scores)[kRows][kTileBlocks], typename A::Act (&weights)[kRows][kTileKeys],
                           Vec (&decay)[kRows]) {
  alignas(64) float fallen[kLanes] = {};  // by how much each row's highest score rose
  KVN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int visible = rows[i].visible - tile.first_key;
    KVN_UNROLL
    for (int j = 0; j < kTileBlocks; ++j) {
      scores[i][j] = keep_first(visible - j * kBlockTokens, scores[i][j], splat(kHidden));
    }
    const Vec* s = scores[i];
    const float before = rows[i].state[kStateHighest];
    const float in_tile = highest(max(max(s[0], s[1]), max(s[2], s[3]))) * scale_log2e;
    const float now = in_tile > before ? in_tile : before;
    rows[i].state[kStateHighest] = now;
    fallen[i] = before - now;
  }
  store(fallen, power_of_two(load(fallen)));
  KVN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const Vec highest_now = splat(-rows[i].state[kStateHighest]);
    Vec w[kTileBlocks];
    KVN_UNROLL
    for (int j = 0; j < kTileBlocks; ++j) {
      w[j] = power_of_two(fma(scores[i][j], splat(scale_log2e), highest_now));
      A::store_act(weights[i] + j * kBlockTokens, w[j]);
    }
    decay[i] = splat(fallen[i]);
    float* sums = rows[i].state + kStateSums;
    store(sums, fma(load(sums), decay[i], add(add(w[0], w[1]), add(w[2], w[3]))));
  }
}

// values = values * decay + weights * V, for kRows rows and 16 * kColumns columns from `column` on.
template <class A, int kRows, int kColumns, bool kFetch>
inline void add_values(const QueryRow<A>* rows, const KvTile& tile, int column, int head_dim,
                       const typename A::Act (*weights)[kTileKeys], const Vec* decay, Fetch& fetch) {
  constexpr int kBlockSteps = kBlockTokens / A::kPack;
  Vec sums[kRows][kColumns];
  KVN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    KVN_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      sums[i][c] = mul(load(rows[i].state + kStateValues + column + c * kLanes), decay[i]);
    }
  }
  const int64_t begin = static_cast<int64_t>(column) * 4, stride = static_cast<int64_t>(head_dim) * 4;
  for (int block = 0; block < tile.num_blocks; ++block) {
    const char* from = tile.values[block] + begin;
    for (int step = 0; step < kBlockSteps; ++step, from += stride) {
      typename A::Steps values[kColumns];
      KVN_UNROLL
      for (int c = 0; c < kColumns; ++c) values[c] = A::load_step(from + c * kStepBytes);
      if constexpr (kFetch) fetch.lines(kColumns);
      KVN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const typename A::Input in = A::input(weights[i], block * kBlockSteps + step);
        KVN_UNROLL
        for (int c = 0; c < kColumns; ++c) sums[i][c] = A::multiply(in, values[c], sums[i][c]);
      }
    }
  }
  KVN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    KVN_UNROLL
    for (int c = 0; c < kColumns; ++c) store(rows[i].state + kStateValues + column + c * kLanes, sums[i][c]);
  }
}

template <class A, int kRows, bool kFetch>
inline void attend_tile(const QueryRow<A>* rows, const KvTile& tile, int head_dim, float scale_log2e, Fetch& fetch) {
  alignas(64) typename A::Act weights[kRows][kTileKeys];
  Vec decay[kRows];
  {
    Vec scores[kRows][kTileBlocks];
    score_tile<A, kRows, kFetch>(rows, tile, head_dim / A::kPack, fetch, scores);
    update_softmax<A, kRows>(rows, tile, scale_log2e, scores, weights, decay);
  }
  int column = 0;
  for (; column + kValueColumns * kLanes <= head_dim; column += kValueColumns * kLanes) {
    add_values<A, kRows, kValueColumns, kFetch>(rows, tile, column, head_dim, weights, decay, fetch);
  }
  for (; column < head_dim; column += kLanes) {
    add_values<A, kRows, 1, kFetch>(rows, tile, column, head_dim, weights, decay, fetch);
  }
}

// into = what a softmax over the keys of both would have given
inline void merge_states(float* into, const float* from, int head_dim) {
  const float highest_of_both =
      from[kStateHighest] > into[kStateHighest] ? from[kStateHighest] : into[kStateHighest];
  const Vec ours = power_of_two(splat(into[kStateHighest] - highest_of_both));
  const Vec theirs = power_of_two(splat(from[kStateHighest] - highest_of_both));
  into[kStateHighest] = highest_of_both;
  for (int i = kStateSums; i < kStateValues + head_dim; i += kLanes) {
    store(into + i, fma(load(into + i), ours, mul(load(from + i), theirs)));
  }
}

template <class A>
inline void finish_state(const float* state, int head_dim, typename A::Act* out) {
  const Vec scale = splat(1.0f / sum(load(state + kStateSums)));
  for (int i = 0; i < head_dim; i += kLanes) {
    // + 0 makes +0 of -0: how many hidden keys a value met must not show in its sign
    A::store_act(out + i, add(mul(load(state + kStateValues + i), scale), zero()));
  }
}

// Queries that one KV head of an item has.
inline int queries_a_head(const AttentionCall& call, const AttentionItem& item) {
  return item.num_rows * (call.num_heads / call.num_kv_heads);
}

// How many keys query `i` of an item sees.
inline int visible_keys(const AttentionCall& call, const AttentionItem& item, int i) {
  return item.start + i % queries_a_head(call, item) / (call.num_heads / call.num_kv_heads) + 1;
}

// Where query `i` of an item stands in [rows, num_heads, head_dim], its first row being `first_row`.
inline int64_t query_offset(const AttentionCall& call, const AttentionItem& item, int64_t first_row, int i) {
  const int group = call.num_heads / call.num_kv_heads, in_head = queries_a_head(call, item);
  const int head = (item.first_kv_head + i / in_head) * group + i % group;
  return ((first_row + i % in_head / group) * call.num_heads + head) * call.head_dim;
}

template <class A>
inline void finish_item(const AttentionCall& call, const AttentionItem& item, const float* states) {
  for (int i = 0; i < item.num_kv_heads * queries_a_head(call, item); ++i) {
    typename A::Act* out = static_cast<typename A::Act*>(call.out) + query_offset(call, item, item.out_row, i);
    finish_state<A>(states + i * state_floats(call.head_dim), call.head_dim, out);
  }
}

// Addresses of the item's KV in the blocks from `first_block` on; behind the last one it is repeated.
inline void find_blocks(const AttentionCall& call, const AttentionItem& item, int64_t head_bytes, int first_block,
                        int num_blocks, const char** blocks) {
  for (int j = 0; j < kTileBlocks; ++j) {
    const int block = smaller(first_block + j, num_blocks - 1);
    blocks[j] = call.layer + item.table[block] * call.block_bytes + item.first_kv_head * head_bytes;
  }
}

// Runs one tile over all rows of one KV head that see any of its keys.
template <class A>
inline void attend_rows(const AttentionCall& call, const QueryRow<A>* rows, int num_rows, const KvTile& tile,
                        Fetch& fetch) {
  bool fetched = false;  // the first group of rows does it
  for (int begin = 0; begin < num_rows; begin += kAttentionRows) {
    const int in_group = num_rows - begin < kAttentionRows ? num_rows - begin : kAttentionRows;
    if (rows[begin + in_group - 1].visible <= tile.first_key) continue;
    with_constant<kAttentionRows>(in_group, [&](auto n) {
      if (fetched) {
        attend_tile<A, n.value, false>(rows + begin, tile, call.head_dim, call.scale_log2e, fetch);
      } else {
        attend_tile<A, n.value, true>(rows + begin, tile, call.head_dim, call.scale_log2e, fetch);
      }
    });
    fetched = true;
  }
}

// Runs the tiles of one split; `fetch` has the blocks of the first one, and afterwards those of the next split's.
template <class A>
inline void attend_split(const AttentionCall& call, const AttentionItem& item, const QueryRow<A>* rows, int first_key,
                         int end_key, int num_blocks, Fetch& fetch) {
  const int64_t head_bytes = fetch.bytes / item.num_kv_heads;
  const int in_head = queries_a_head(call, item);
  KvTile tile;
  for (tile.first_key = first_key; tile.first_key < end_key; tile.first_key += kTileKeys) {
    const int first_block = tile.first_key / kBlockTokens;
    tile.num_blocks = smaller(kTileBlocks, num_blocks - first_block);
    for (int j = 0; j < kTileBlocks; ++j) {
      tile.keys[j] = fetch.blocks[j];
      tile.values[j] = fetch.blocks[j] + head_bytes / 2;
    }
    find_blocks(call, item, head_bytes, first_block + kTileBlocks, num_blocks, fetch.blocks);
    fetch.begin();
    for (int head = 0; head < item.num_kv_heads; ++head) {
      attend_rows<A>(call, rows + head * in_head, in_head, tile, fetch);
      for (int j = 0; j < kTileBlocks; ++j) {
        tile.keys[j] += head_bytes;
        tile.values[j] += head_bytes;
      }
    }
  }
}

template <class A>
void attend(const AttentionCall& call, const AttentionItem& item, float* scratch) {
  const int num_rows = item.num_kv_heads * queries_a_head(call, item);
  const int64_t floats = state_floats(call.head_dim);
  float* first = item.partial != nullptr ? item.partial : scratch;
  float* later = scratch + num_rows * floats;
  QueryRow<A> rows[kMaxItemQueries];
  for (int i = 0; i < num_rows; ++i) {
    rows[i].query = static_cast<const typename A::Act*>(call.queries) + query_offset(call, item, item.query_row, i);
    rows[i].visible = visible_keys(call, item, i);
  }
  const int num_keys = smaller(item.start + item.num_rows, item.end_split * kSplitKeys);
  const int num_blocks = (num_keys + kBlockTokens - 1) / kBlockTokens;
  const int64_t head_bytes = int64_t{2} * kBlockTokens * call.head_dim * sizeof(typename A::Stored);
  Fetch fetch;
  fetch.bytes = item.num_kv_heads * head_bytes;
  find_blocks(call, item, head_bytes, item.first_split * kSplitKeys / kBlockTokens, num_blocks, fetch.blocks);
  fetch.all();
  for (int split = item.first_split; split < item.end_split; ++split) {
    const int first_key = split * kSplitKeys, end_key = smaller(num_keys, first_key + kSplitKeys);
    float* states = split == item.first_split ? first : later;
    for (int i = 0; i < num_rows; ++i) {
      rows[i].state = states + i * floats;
      reset_state(rows[i].state, call.head_dim);
    }
    attend_split<A>(call, item, rows, first_key, end_key, num_blocks, fetch);
    for (int i = 0; states == later && i < num_rows; ++i) {
      if (rows[i].visible > first_key) merge_states(first + i * floats, rows[i].state, call.head_dim);
    }
  }
  if (item.partial == nullptr) finish_item<A>(call, item, first);
}

// The states of the item's splits lie one after the other; those of the first one take the others up.
template <class A>
void merge(const AttentionCall& call, const AttentionItem& item, float* partials, int num_splits) {
  const int num_rows = item.num_kv_heads * queries_a_head(call, item);
  const int64_t floats = state_floats(call.head_dim);
  for (int split = 1; split < num_splits; ++split) {
    for (int i = 0; i < num_rows; ++i) {
      if (visible_keys(call, item, i) <= split * kSplitKeys) continue;
      merge_states(partials + i * floats, partials + (split * num_rows + i) * floats, call.head_dim);
    }
  }
  finish_item<A>(call, item, partials);
}
