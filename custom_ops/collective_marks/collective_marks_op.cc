#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>MarkCollective")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type")
    .Attr("collective: string")
    .Attr("ended: bool")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("Passes a tensor through and marks that a collective begins, or has ended, for the watchdog of this process.");

}  // namespace fusedrec
