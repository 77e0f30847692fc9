// Inputs, attributes and shape functions that the ops of this folder share. Sources include TensorFlow's headers first.
#pragma once

#include "absl/strings/str_cat.h"

namespace fusedrec {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Checks the ranks of row_splits and num_targets, inputs `first` and `first + 1` of every op of this folder.
inline absl::Status CheckRows(InferenceContext* c, int first) {
  ShapeHandle unused;
  for (int i = first; i < first + 2; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return absl::OkStatus();
}

// Checks the ranks of position_weights, time_weights, thresholds, asks, answers and contextual_lengths.
inline absl::Status CheckBias(InferenceContext* c, int first) {
  ShapeHandle unused;
  for (int i = first; i < first + 6; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return absl::OkStatus();
}

// Checks query_splits, the last input but dropout_seed, and returns whether it is given.
inline absl::Status HasQuerySplits(InferenceContext* c, bool* has) {
  int number, seeds = 0;
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->GetAttr("num_query_splits", &number));
  c->GetAttr("num_dropout_seeds", &seeds).IgnoreError();  // not an attribute of all ops
  if (number > 1) return absl::InvalidArgumentError(absl::StrCat("query_splits must be one tensor, got ", number, "."));
  *has = number == 1;
  return *has ? c->WithRank(c->input(c->num_inputs() - 1 - seeds), 1, &unused) : absl::OkStatus();
}

// Gives dimension d of two shapes the same size.
inline absl::Status MergeDim(InferenceContext* c, int d, ShapeHandle* a, ShapeHandle* b) {
  DimensionHandle common;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(*a, d), c->Dim(*b, d), &common));
  TF_RETURN_IF_ERROR(c->ReplaceDim(*a, d, common, a));
  return c->ReplaceDim(*b, d, common, b);
}

struct Tokens {
  ShapeHandle query, key, value, out;
};

// Merges the dimensions of query, key and value, inputs `first` to `first + 2`. With query_splits, query has its own T.
inline absl::Status MergeTokens(InferenceContext* c, int first, Tokens* tokens) {
  bool own_queries = false;
  TF_RETURN_IF_ERROR(HasQuerySplits(c, &own_queries));
  ShapeHandle *query = &tokens->query, *key = &tokens->key, *value = &tokens->value;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 3, query));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 1), 3, key));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 2), 3, value));
  for (int d = 0; d < 2; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, key, value));  // T and H
  for (int d = own_queries ? 1 : 0; d < 3; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, query, key));
  for (int d = 0; d < 2; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, key, value));  // what query knows of them
  return c->ReplaceDim(*value, 0, c->Dim(*query, 0), &tokens->out);
}

// Checks the ranks of the inputs of an op that attends, from query at `first` on.
inline absl::Status CheckAttention(InferenceContext* c, int first, Tokens* tokens) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(MergeTokens(c, first, tokens));
  TF_RETURN_IF_ERROR(CheckRows(c, first + 3));
  TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(first + 5), 1, &unused));
  return CheckBias(c, first + 6);
}

// Inputs query to scale of the ops that attend, and their attributes.
#define FUSEDREC_ATTENTION_INPUTS \
  .Input("query: T")              \
  .Input("key: T")                \
  .Input("value: T")              \
  .Input("row_splits: int64")     \
  .Input("num_targets: int64")    \
  .Input("scale: float")

#define FUSEDREC_ATTENTION_ATTRS        \
  .Attr("T: {float, half, bfloat16}")   \
  .Attr("alpha: float = 1.0")

// The last inputs of every op of this folder, and the attributes that say which of them count.
#define FUSEDREC_BIAS_INPUTS        \
  .Input("position_weights: float") \
  .Input("time_weights: float")     \
  .Input("thresholds: int64")       \
  .Input("asks: int64")             \
  .Input("answers: int64")          \
  .Input("contextual_lengths: int64") \
  .Input("query_splits: num_query_splits * int64")

// The last input of the ops that attend.
#define FUSEDREC_DROPOUT_INPUT .Input("dropout_seed: num_dropout_seeds * int64")
#define FUSEDREC_DROPOUT_ATTRS  \
  .Attr("dropout: float = 0.0") \
  .Attr("num_dropout_seeds: int >= 0 = 0")

#define FUSEDREC_MASK_AND_BIAS_ATTRS       \
  .Attr("attention_window: int >= 0 = 0")  \
  .Attr("min_full_length: int >= 0 = 0")   \
  .Attr("global_window: int >= 0 = 0")     \
  .Attr("target_group_size: int >= 1 = 1") \
  .Attr("targets: bool = false")           \
  .Attr("position: bool = false")          \
  .Attr("num_query_splits: int >= 0 = 0")  \
  .Attr("time: {'none', 'buckets', 'power', 'exponential', 'stretched'} = 'none'")

}  // namespace fusedrec
