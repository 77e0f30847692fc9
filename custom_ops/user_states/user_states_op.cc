// The cache of user states, its finds and writes, and what it says of itself.
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Outputs from `first` on, one [rows, columns] for each part of the kind.
static absl::Status PartShapes(InferenceContext* c, const char* columns_name, DimensionHandle rows, int first) {
  std::vector<int64_t> columns;
  TF_RETURN_IF_ERROR(c->GetAttr(columns_name, &columns));
  for (size_t p = 0; p < columns.size() && first + static_cast<int>(p) < c->num_outputs(); ++p) {
    c->set_output(first + p, c->Matrix(rows, columns[p] < 0 ? InferenceContext::kUnknownDim : columns[p]));
  }
  return absl::OkStatus();
}

// Checks the shapes of users, version and now, and returns that of users.
static absl::Status RequireRequest(InferenceContext* c, ShapeHandle* users) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
  return c->WithRank(c->input(1), 1, users);
}

REGISTER_OP("Fusedrec>UserStates")
    .Output("states: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("token_types: list({float, bfloat16, half, int64}) >= 1")
    .Attr("token_columns: list(int) >= 1")
    .Attr("user_types: list({float, bfloat16, half, int64}) >= 0")
    .Attr("user_columns: list(int) >= 0")
    .Attr("max_bytes: int")
    .Attr("page_tokens: int = 64")
    .Attr("ttl: int = 0")
    .Attr("anonymous: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("A cache of user states in host memory: tokens in pages, and parts that each write replaces.");

REGISTER_OP("Fusedrec>UserStatesFind")
    .Input("states: resource")
    .Input("users: int64")
    .Input("version: int64")
    .Input("now: int64")
    .Output("revisions: int64")
    .Output("row_splits: int64")
    .Output("of_tokens: token_types")
    .Output("of_users: user_types")
    .Attr("token_types: list({float, bfloat16, half, int64}) >= 1")
    .Attr("token_columns: list(int) >= 1")
    .Attr("user_types: list({float, bfloat16, half, int64}) >= 0")
    .Attr("user_columns: list(int) >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle users;
      DimensionHandle splits;
      TF_RETURN_IF_ERROR(RequireRequest(c, &users));
      TF_RETURN_IF_ERROR(c->Add(c->Dim(users, 0), 1, &splits));
      c->set_output(0, users);
      c->set_output(1, c->Vector(splits));
      std::vector<tensorflow::DataType> types;
      TF_RETURN_IF_ERROR(c->GetAttr("token_types", &types));
      TF_RETURN_IF_ERROR(PartShapes(c, "token_columns", c->UnknownDim(), 2));
      return PartShapes(c, "user_columns", c->Dim(users, 0), 2 + types.size());
    })
    .Doc("Reads the states of users, each as it was at one moment.");

REGISTER_OP("Fusedrec>UserStatesWrite")
    .Input("states: resource")
    .Input("users: int64")
    .Input("version: int64")
    .Input("now: int64")
    .Input("revisions: int64")
    .Input("row_splits: int64")
    .Input("of_tokens: token_types")
    .Input("of_users: user_types")
    .Output("written: bool")
    .Attr("token_types: list({float, bfloat16, half, int64}) >= 1")
    .Attr("user_types: list({float, bfloat16, half, int64}) >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle users, unused;
      TF_RETURN_IF_ERROR(RequireRequest(c, &users));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(5), 1, &unused));
      for (int i = 6; i < c->num_inputs(); ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 2, &unused));
      c->set_output(0, users);
      return absl::OkStatus();
    })
    .Doc("Appends tokens to states, or puts new states, user by user.");

REGISTER_OP("Fusedrec>UserStatesDrop")
    .Input("states: resource")
    .Input("version: int64")
    .Output("dropped: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      return tensorflow::shape_inference::ScalarShape(c);
    })
    .Doc("Drops the states of old versions.");

REGISTER_OP("Fusedrec>UserStatesSpill")
    .Input("states: resource")
    .Input("tier_folder: string")
    .Input("tier_bytes: int64")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
      return tensorflow::shape_inference::ScalarShape(c);
    })
    .Doc("Opens a file for the states that leave memory.");

REGISTER_OP("Fusedrec>UserStatesStatistics")
    .Input("states: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(15));
      return absl::OkStatus();
    })
    .Doc("Counts since the cache was made; states, tokens, bytes, tier_states and tier_bytes describe this moment.");

}  // namespace fusedrec
