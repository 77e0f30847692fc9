import sys, traceback, ctypes
from tests.cuda import op_kernels as k
orig=k.refused; bad=[]
def refused(error, words, call):
    try: orig(error, words, call)
    except BaseException as e:
        bad.append((words, type(e).__name__, str(e)[-400:])); print("BAD", words, "|", type(e).__name__, str(e)[-500:], flush=True)
k.refused=refused
import importlib
from tf_fusedrec._tf_compat import tf
tf.load_op_library(sys.argv[1])
for n in sys.argv[2:]:
    m=importlib.import_module("tests.cuda.op_kernels_"+n)
    try:
        m.run(*([ctypes.CDLL(sys.argv[1]).emulation_allocations_left] if n=="memory" else [])); print("ran",n,flush=True)
    except BaseException: traceback.print_exc(file=sys.stdout); print("EXC",n,flush=True)
