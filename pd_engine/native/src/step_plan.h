// A checked step, laid out for the kernels.
#pragma once

#include <stdint.h>

#include <vector>

#include "api.h"
#include "model.h"

namespace kvn {

// Rows of one sequence that stand at neighbouring positions.
struct Segment {
  const int32_t* table;
  int64_t query_row;
  int64_t out_row;
  int num_rows;
  int start;
};

// positions, blocks: of each row; segments: the step's sequences; last: one segment for each selected row
struct StepPlan {
  std::vector<int32_t> positions;
  std::vector<int32_t> blocks;
  std::vector<Segment> segments;
  std::vector<Segment> last;
  std::vector<int32_t> to_zero;  // blocks that a sequence enters and does not fill in this step
};

// Throws InvalidCall, naming the sequence, when ids, positions, tables or rows are out of bounds. Nothing is written.
void plan_step(const Model& model, const KvnStep& step, StepPlan& plan);

}  // namespace kvn
