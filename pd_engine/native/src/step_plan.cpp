#include "step_plan.h"

#include <algorithm>
#include <string>

namespace kvn {

namespace {

constexpr int32_t kMaxRows = 1 << 20;

[[noreturn]] void refuse(const std::string& sentence) { throw InvalidCall(sentence); }

std::string sequence_name(int32_t sequence) { return "sequence " + std::to_string(sequence); }

void check_shape(const Model& model, const KvnStep& step) {
  if (step.num_rows < 1 || step.num_rows > kMaxRows) refuse("a step of " + std::to_string(step.num_rows) + " rows");
  if (step.num_sequences < 1 || step.num_sequences > step.num_rows) refuse("sequences without rows");
  if (step.num_selected < 0 || step.num_selected > kMaxRows) refuse("too many selected rows");
  if (step.num_blocks < 1 || step.pool == nullptr) refuse("a step without a pool");
  if (step.pool_bytes != step.num_blocks * model.block_bytes()) {
    refuse("a pool of " + std::to_string(step.pool_bytes) + " bytes does not hold " + std::to_string(step.num_blocks) +
           " blocks of " + std::to_string(model.block_bytes()));
  }
  if (reinterpret_cast<uintptr_t>(step.pool) % alignof(float) != 0) refuse("the pool is not aligned to 4 bytes");
  if (step.row_bounds[0] != 0 || step.row_bounds[step.num_sequences] != step.num_rows || step.table_bounds[0] < 0) {
    refuse("the sequences do not cover the rows");
  }
  for (int32_t i = 0; i < step.num_selected; ++i) {
    if (step.selected[i] < 0 || step.selected[i] >= step.num_rows) refuse("a selected row is none of the step's");
  }
}

void check_sequence(const Model& model, const KvnStep& step, int32_t sequence) {
  const int32_t begin = step.row_bounds[sequence], end = step.row_bounds[sequence + 1];
  if (begin >= end || end > step.num_rows) refuse(sequence_name(sequence) + " has no rows");
  const int64_t start = step.starts[sequence], after = start + end - begin;
  if (start < 0 || after > model.spec.context_tokens) {
    refuse(sequence_name(sequence) + " stands at positions " + std::to_string(start) + " to " + std::to_string(after) +
           "; the context has " + std::to_string(model.spec.context_tokens));
  }
  for (int32_t row = begin; row < end; ++row) {
    if (step.ids[row] < 0 || step.ids[row] >= model.spec.vocab_size) {
      refuse(sequence_name(sequence) + ": id " + std::to_string(step.ids[row]) + " is outside the vocabulary");
    }
  }
  const int64_t num_needed = (after + kBlockTokens - 1) / kBlockTokens;
  const int64_t table = step.table_bounds[sequence], table_end = step.table_bounds[sequence + 1];
  if (table_end - table < num_needed) {
    refuse(sequence_name(sequence) + " needs " + std::to_string(num_needed) + " blocks, its table has " +
           std::to_string(table_end - table));
  }
  for (int64_t i = table; i < table + num_needed; ++i) {
    if (step.tables[i] < 0 || step.tables[i] >= step.num_blocks) {
      refuse(sequence_name(sequence) + ": block " + std::to_string(step.tables[i]) + " is outside the pool of " +
             std::to_string(step.num_blocks));
    }
  }
}

void add_sequence(const KvnStep& step, int32_t sequence, StepPlan& plan) {
  const int32_t begin = step.row_bounds[sequence], end = step.row_bounds[sequence + 1], start = step.starts[sequence];
  const int32_t* table = step.tables + step.table_bounds[sequence];
  plan.segments.push_back({table, begin, begin, end - begin, start});
  for (int32_t row = begin; row < end; ++row) {
    const int32_t position = start + row - begin;
    plan.positions.push_back(position);
    plan.blocks.push_back(table[position / kBlockTokens]);
  }
  // A block that the step fills is written over from end to end. Only one can be entered and stay unfinished: the last.
  const int32_t after = start + end - begin, last_begin = after / kBlockTokens * kBlockTokens;
  if (last_begin >= start && last_begin < after) plan.to_zero.push_back(table[last_begin / kBlockTokens]);
}

}  // namespace

void plan_step(const Model& model, const KvnStep& step, StepPlan& plan) {
  check_shape(model, step);
  for (int32_t sequence = 0; sequence < step.num_sequences; ++sequence) check_sequence(model, step, sequence);
  plan.positions.clear();
  plan.blocks.clear();
  plan.segments.clear();
  plan.last.clear();
  plan.to_zero.clear();
  for (int32_t sequence = 0; sequence < step.num_sequences; ++sequence) add_sequence(step, sequence, plan);
  for (int32_t i = 0; i < step.num_selected; ++i) {
    const int32_t row = step.selected[i];
    const auto after = std::upper_bound(step.row_bounds, step.row_bounds + step.num_sequences + 1, row);
    const Segment& segment = plan.segments[after - step.row_bounds - 1];
    plan.last.push_back({segment.table, row, i, 1, segment.start + static_cast<int>(row - segment.query_row)});
  }
}

}  // namespace kvn
