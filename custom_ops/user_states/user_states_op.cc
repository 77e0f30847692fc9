// The cache of user states, its finds and writes, and its statistics.
#include <cstring>

#include "common/kernel_util.h"
#include "common/shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "user_states/user_states.h"

namespace fusedrec {

using tensorflow::DataType;

REGISTER_OP("Fusedrec>UserStates")
    .Output("states: resource")
    .Attr("container: string = ''").Attr("shared_name: string = ''")
    .Attr("token_types: list({float, bfloat16, half, int64}) >= 1").Attr("token_columns: list(int) >= 1")
    .Attr("user_types: list({float, bfloat16, half, int64}) >= 0").Attr("user_columns: list(int) >= 0")
    .Attr("max_bytes: int").Attr("page_tokens: int = 64").Attr("ttl: int = 0").Attr("anonymous: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("A cache of user states in host memory: tokens in pages, and parts that each write replaces.");

REGISTER_OP("Fusedrec>UserStatesFind")
    .Input("states: resource").Input("users: int64").Input("version: int64").Input("now: int64")
    .Output("revisions: int64").Output("row_splits: int64").Output("of_tokens: token_types")
    .Output("of_users: user_types")
    .Attr("token_types: list({float, bfloat16, half, int64}) >= 1").Attr("token_columns: list(int) >= 1")
    .Attr("user_types: list({float, bfloat16, half, int64}) >= 0").Attr("user_columns: list(int) >= 0")
    .SetIsStateful()
    .SetShapeFn(Shapes("* [b] [] [] -> [b] [b+1] token_types*[?,token_columns] user_types*[b,user_columns]"))
    .Doc("Reads the states of users, each as it was at one moment.");

REGISTER_OP("Fusedrec>UserStatesWrite")
    .Input("states: resource").Input("users: int64").Input("version: int64").Input("now: int64")
    .Input("revisions: int64").Input("row_splits: int64").Input("of_tokens: token_types").Input("of_users: user_types")
    .Output("written: bool")
    .Attr("token_types: list({float, bfloat16, half, int64}) >= 1")
    .Attr("user_types: list({float, bfloat16, half, int64}) >= 0")
    .SetIsStateful()
    .SetShapeFn(Shapes("* [b] [] [] [n] [s] token_types*[t,c] user_types*[u,d] -> [b]"))
    .Doc("Appends tokens to states, or puts new states, user by user.");

REGISTER_OP("Fusedrec>UserStatesDrop")
    .Input("states: resource").Input("version: int64")
    .Output("dropped: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("* [] -> []"))
    .Doc("Drops the states of old versions.");

REGISTER_OP("Fusedrec>UserStatesSpill")
    .Input("states: resource").Input("tier_folder: string").Input("tier_bytes: int64")
    .Output("bytes: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("* [] [] -> []"))
    .Doc("Opens a file for the states that leave memory.");

REGISTER_OP("Fusedrec>UserStatesStatistics")
    .Input("states: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("* -> [15]"))
    .Doc("Counts since the cache was made; states, tokens, bytes, tier_states and tier_bytes describe this moment.");

namespace {

struct Parts {
  std::vector<DataType> types;
  std::vector<int64_t> columns;

  absl::Status Read(OpKernelConstruction* ctx, const std::string& kind) {
    FUSEDREC_TRY(ctx->GetAttr(absl::StrCat(kind, "_types"), &types));
    FUSEDREC_TRY(ctx->GetAttr(absl::StrCat(kind, "_columns"), &columns));
    const std::string name = absl::StrCat(kind, "_columns");
    if (types.size() != columns.size()) {
      return Invalid(name, " must have one number for each of the ", types.size(), " types, got ", columns.size(), ".");
    }
    for (const int64_t number : columns) {
      FUSEDREC_TRY(RequireIn(name.c_str(), number, 0, kMostColumns, "the columns of one part."));
    }
    return absl::OkStatus();
  }
  std::vector<int64_t> Bytes() const {
    std::vector<int64_t> bytes;
    for (size_t p = 0; p < types.size(); ++p) bytes.push_back(columns[p] * tensorflow::DataTypeSize(types[p]));
    return bytes;
  }
};

class StatesResource : public tensorflow::ResourceBase {
 public:
  StatesResource(std::unique_ptr<UserStates> states, Parts of_token, Parts of_user)
      : of_token(std::move(of_token)), of_user(std::move(of_user)), states_(std::move(states)) {}
  UserStates* states() const { return states_.get(); }
  std::string DebugString() const override { return "fusedrec.UserStates"; }

  const Parts of_token, of_user;

 private:
  const std::unique_ptr<UserStates> states_;
};

class UserStatesOp : public tensorflow::ResourceOpKernel<StatesResource> {
 public:
  explicit UserStatesOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, of_token_.Read(ctx, "token"));
    OP_REQUIRES_OK(ctx, of_user_.Read(ctx, "user"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("page_tokens", &spec_.page_tokens));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_bytes", &spec_.max_bytes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ttl", &spec_.ttl));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("anonymous", &anonymous_));
    spec_.token_bytes = of_token_.Bytes();
    spec_.user_bytes = of_user_.Bytes();
  }

  void Compute(OpKernelContext* ctx) override {
    if (!anonymous_) return ResourceOpKernel::Compute(ctx);
    StatesResource* resource = nullptr;
    Tensor* out;
    OP_REQUIRES_OK(ctx, CreateResource(&resource));
    const auto handle = tensorflow::ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<tensorflow::ResourceHandle>()() = handle;
  }

 private:
  absl::Status CreateResource(StatesResource** resource) override {
    auto states = UserStates::Make(spec_);
    if (!states.ok()) return states.status();
    *resource = new StatesResource(*std::move(states), of_token_, of_user_);
    return absl::OkStatus();
  }

  UserStatesSpec spec_;
  Parts of_token_, of_user_;
  bool anonymous_;
};

template <absl::Status (*kRun)(OpKernelContext*, StatesResource*)>
class StatesFunctionOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) final {
    tensorflow::core::RefCountPtr<StatesResource> resource;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource));
    OP_REQUIRES_OK(ctx, kRun(ctx, resource.get()));
  }
};

struct Request {
  absl::Span<const int64_t> users;
  int64_t version, now;

  absl::Status Read(OpKernelContext* ctx) {
    FUSEDREC_TRY(RequireRank("users", ctx->input(1), 1));
    users = In<int64_t>(ctx->input(1));
    FUSEDREC_TRY(ScalarInput(ctx, 2, "version", &version));
    return ScalarInput(ctx, 3, "now", &now);
  }
};

std::string Word(const Parts& parts) {
  std::string words;
  for (size_t p = 0; p < parts.types.size(); ++p) {
    absl::StrAppend(&words, p ? ", " : "", tensorflow::DataTypeString(parts.types[p]), " x ", parts.columns[p]);
  }
  return words;
}

absl::Status RequireSameParts(const char* name, const Parts& got, const Parts& wanted) {
  if (got.types == wanted.types && got.columns == wanted.columns) return absl::OkStatus();
  return Invalid(name, " must have the parts of the cache, ", Word(wanted), ", got ", Word(got), ".");
}

char* Bytes(Tensor* tensor) { return static_cast<char*>(tensor->data()); }

// Reads states. Its attributes, from which static shapes come, must equal the attributes of the cache.
class FindOp : public OpKernel {
 public:
  explicit FindOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, of_token_.Read(ctx, "token"));
    OP_REQUIRES_OK(ctx, of_user_.Read(ctx, "user"));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<StatesResource> resource;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &resource));
    Request request;
    OP_REQUIRES_OK(ctx, request.Read(ctx));
    OP_REQUIRES_OK(ctx, RequireSameParts("of_tokens", of_token_, resource->of_token));
    OP_REQUIRES_OK(ctx, RequireSameParts("of_users", of_user_, resource->of_user));
    UserStates* states = resource->states();

    const int64_t users = request.users.size();
    std::vector<UserStates::Snapshot> found;
    std::vector<int64_t> revisions, row_splits{0};
    for (const int64_t user : request.users) {
      found.push_back(states->Find({user, request.version}, request.now));
      revisions.push_back(found.back().revision);
      row_splits.push_back(row_splits.back() + found.back().tokens);
    }
    std::vector<char*> of_tokens, of_users;
    OP_REQUIRES_OK(ctx, Give(ctx, 0, revisions));
    OP_REQUIRES_OK(ctx, Give(ctx, 1, row_splits));
    OP_REQUIRES_OK(ctx, Allocate(ctx, "of_tokens", of_token_, row_splits.back(), &of_tokens));
    OP_REQUIRES_OK(ctx, Allocate(ctx, "of_users", of_user_, users, &of_users));
    states->Read(found, of_tokens, CpuPool(ctx));
    const std::vector<int64_t>& bytes = states->spec().user_bytes;
    for (int64_t b = 0; b < users; ++b) {
      const char* from = found[b].revision == 0 ? nullptr : found[b].of_user->data();
      for (size_t q = 0; q < bytes.size(); ++q) {
        char* to = of_users[q] + b * bytes[q];
        if (from == nullptr) {
          std::memset(to, 0, bytes[q]);
        } else {
          std::memcpy(to, from, bytes[q]);
          from += bytes[q];
        }
      }
    }
  }

 private:
  static absl::Status Allocate(OpKernelContext* ctx, const char* name, const Parts& parts, int64_t rows,
                               std::vector<char*>* data) {
    OpOutputList outputs;
    FUSEDREC_TRY(ctx->output_list(name, &outputs));
    for (int p = 0; p < outputs.size(); ++p) {
      Tensor* out;
      FUSEDREC_TRY(outputs.allocate(p, TensorShape({rows, parts.columns[p]}), &out));
      data->push_back(Bytes(out));
    }
    return absl::OkStatus();
  }

  Parts of_token_, of_user_;
};

absl::Status ReadParts(OpKernelContext* ctx, const char* name, const Parts& wanted, int64_t rows,
                       std::vector<const char*>* data) {
  OpInputList inputs;
  FUSEDREC_TRY(ctx->input_list(name, &inputs));
  Parts got;
  for (int p = 0; p < inputs.size(); ++p) {
    FUSEDREC_TRY(RequireRank(name, inputs[p], 2));
    got.types.push_back(inputs[p].dtype());
    got.columns.push_back(inputs[p].dim_size(1));
    data->push_back(static_cast<const char*>(inputs[p].data()));
  }
  FUSEDREC_TRY(RequireSameParts(name, got, wanted));
  for (int p = 0; p < inputs.size(); ++p) {
    if (inputs[p].dim_size(0) == rows) continue;
    return Invalid(name, "[", p, "] must have ", rows, " rows, got shape ", inputs[p].shape().DebugString(), ".");
  }
  return absl::OkStatus();
}

absl::Status Write(OpKernelContext* ctx, StatesResource* resource) {
  Request request;
  FUSEDREC_TRY(request.Read(ctx));
  const int64_t users = request.users.size();
  const Tensor &revisions = ctx->input(4), &splits = ctx->input(5);
  FUSEDREC_TRY(RequireRank("revisions", revisions, 1));
  FUSEDREC_TRY(RequireRank("row_splits", splits, 1));
  if (revisions.NumElements() != users || splits.NumElements() != users + 1) {
    return Invalid("revisions and row_splits must have ", users, " and ", users + 1, " entries for ", users,
        " users, got ", revisions.NumElements(), " and ", splits.NumElements(), ".");
  }
  const absl::Span<const int64_t> row_splits = In<int64_t>(splits);
  FUSEDREC_TRY(RequireSplits("row_splits", row_splits, row_splits.back()));
  UserStates::Content all{0, {}, {}};
  FUSEDREC_TRY(ReadParts(ctx, "of_tokens", resource->of_token, row_splits.back(), &all.of_tokens));
  FUSEDREC_TRY(ReadParts(ctx, "of_users", resource->of_user, users, &all.of_user));
  Tensor* written;
  FUSEDREC_TRY(ctx->allocate_output(0, TensorShape({users}), &written));

  const UserStatesSpec& spec = resource->states()->spec();
  absl::Status first_error;
  for (int64_t b = 0; b < users; ++b) {
    Out<bool>(written)[b] = false;
    const int64_t revision = In<int64_t>(revisions)[b];
    if (revision == -1) continue;
    UserStates::Content of_user{row_splits[b + 1] - row_splits[b], all.of_tokens, all.of_user};
    for (size_t p = 0; p < spec.token_bytes.size(); ++p) of_user.of_tokens[p] += row_splits[b] * spec.token_bytes[p];
    for (size_t q = 0; q < spec.user_bytes.size(); ++q) of_user.of_user[q] += b * spec.user_bytes[q];
    const StateKey key{request.users[b], request.version};
    const auto done = resource->states()->Write(key, revision, of_user, request.now, CpuPool(ctx));
    first_error.Update(done.status());  // The other users of the batch are written.
    if (done.ok()) Out<bool>(written)[b] = *done;
  }
  return first_error;
}

absl::Status Drop(OpKernelContext* ctx, StatesResource* resource) {
  int64_t version;
  FUSEDREC_TRY(ScalarInput(ctx, 1, "version", &version));
  return Give<int64_t>(ctx, 0, {resource->states()->Drop(version)}, TensorShape({}));
}

absl::Status Spill(OpKernelContext* ctx, StatesResource* resource) {
  tensorflow::tstring folder;
  int64_t most;
  FUSEDREC_TRY(ScalarInput(ctx, 1, "tier_folder", &folder));
  FUSEDREC_TRY(ScalarInput(ctx, 2, "tier_bytes", &most));
  FUSEDREC_TRY(resource->states()->OpenFile(std::string(folder), most));
  ctx->set_output(0, ctx->input(2));
  return absl::OkStatus();
}

absl::Status Statistics(OpKernelContext* ctx, StatesResource* resource) {
  const UserStatesStatistics s = resource->states()->Statistics();
  return Give<int64_t>(ctx, 0, {s.states, s.tokens, s.bytes, s.hits, s.misses, s.writes, s.outrun, s.no_room, s.evictions,
                                s.expirations, s.tier_states, s.tier_bytes, s.tier_hits, s.tier_evictions,
                                s.tier_failures});
}

}  // namespace

// States lie in host memory, where the pages of all users fit, for models on a GPU too.
#define FUSEDREC_REQUEST \
  .HostMemory("states").HostMemory("users").HostMemory("version").HostMemory("now")
#define FUSEDREC_CONTENT \
  .HostMemory("revisions").HostMemory("row_splits").HostMemory("of_tokens").HostMemory("of_users")
FUSEDREC_KERNEL_ON_HOST("UserStates", UserStatesOp, .HostMemory("states"));
FUSEDREC_KERNEL_ON_HOST("UserStatesFind", FindOp, FUSEDREC_REQUEST FUSEDREC_CONTENT);
FUSEDREC_KERNEL_ON_HOST("UserStatesWrite", StatesFunctionOp<Write>,
                        FUSEDREC_REQUEST FUSEDREC_CONTENT.HostMemory("written"));
FUSEDREC_KERNEL_ON_HOST("UserStatesDrop", StatesFunctionOp<Drop>,
                        .HostMemory("states").HostMemory("version").HostMemory("dropped"));
FUSEDREC_KERNEL_ON_HOST("UserStatesSpill", StatesFunctionOp<Spill>,
                        .HostMemory("states").HostMemory("tier_folder").HostMemory("tier_bytes").HostMemory("bytes"));
FUSEDREC_KERNEL_ON_HOST("UserStatesStatistics", StatesFunctionOp<Statistics>,
                        .HostMemory("states").HostMemory("counts"));
#undef FUSEDREC_CONTENT
#undef FUSEDREC_REQUEST

}  // namespace fusedrec
