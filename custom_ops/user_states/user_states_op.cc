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
    .Doc(R"doc(
A cache of user states in host memory: tokens in pages, which only grow, and parts of the user, which each write replaces.

states: handle of the resource.
token_types: [P] dtype of each part of a token.
token_columns: [P] columns of each part of a token.
user_types: [Q] dtype of each part of a user.
user_columns: [Q] columns of each part of a user.
max_bytes: limit of the memory, pages of running requests included. The state used least recently leaves first.
page_tokens: tokens of a page.
ttl: seconds without use after which a state leaves; 0 for never.
anonymous: each run makes a new cache, which lives as long as a handle of it. shared_name is then unused.
)doc");

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
    .Doc(R"doc(
Reads the states of users, each as it was at one moment. A find is a use.

states: of UserStates.
users: <int64>[B], any value; a user may come several times.
version: <int64>[] of the model. States of other versions are not found.
now: <int64>[] time in seconds.
revisions: <int64>[B] of each state, which UserStatesWrite takes; 0 where there is no state.
row_splits: <int64>[B+1] tokens of each user; none where there is no state.
of_tokens: [P] parts <token_types[p]>[T, token_columns[p]], the tokens user by user.
of_users: [Q] parts <user_types[q]>[B, user_columns[q]]; zeros where there is no state.
token_types: of the cache.
token_columns: of the cache.
user_types: of the cache.
user_columns: of the cache.
)doc");

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
    .Doc(R"doc(
Appends tokens to states, or puts new states, user by user.

states: of UserStates.
users: <int64>[B].
version: <int64>[] of the model that made the tokens.
now: <int64>[] time in seconds.
revisions: <int64>[B] of UserStatesFind: the state to append to. 0 replaces any present state; -1 writes
  nothing.
row_splits: <int64>[B+1] tokens to write of each user.
of_tokens: [P] parts <token_types[p]>[T, token_columns[p]], the tokens user by user.
of_users: [Q] parts <user_types[q]>[B, user_columns[q]], which replace those of the state.
written: <bool>[B] false where another request was quicker, the state has left, or readers hold too much memory.
token_types: of the cache.
user_types: of the cache.
)doc");

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
    .Doc(R"doc(
Drops the states of old versions.

states: of UserStates.
version: <int64>[] the oldest version whose states stay.
dropped: <int64>[] number of states.
)doc");

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
    .Doc(R"doc(
Opens a file for the states that leave memory. A find brings them back.

states: of UserStates, without a file.
tier_folder: <string>[] folder of the file, which has no name and is gone with the process.
tier_bytes: <int64>[] limit of the file, and of what stays in memory of its states.
bytes: <int64>[] tier_bytes.
)doc");

REGISTER_OP("Fusedrec>UserStatesStatistics")
    .Input("states: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(15));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Counts since the cache was made; states, tokens, bytes, tier_states and tier_bytes describe this moment.

states: of UserStates.
counts: <int64>[15] states, tokens, bytes, hits, misses, writes, writes that another request outran, writes without room,
  evictions, expirations; in the file: states, bytes, hits, evictions, failures.
)doc");

}  // namespace fusedrec
