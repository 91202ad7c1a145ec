"""INT8 KV-cache attention on a Hopper GPU: cache write and prefix (Triton), decode (CUDA C++).

``layout``, ``tuning`` <- {``shape``, ``device``} <- {``producer``, ``decode``, ``prefix``} <-
``check`` <- ``bench``; ``nvrtc`` compiles and launches for ``decode``, ``rivals`` are vLLM's own
kernels for ``bench``. The kernels, ``steps`` (how a step becomes launches) and ``counters`` <-
``backend``, the only module that knows vLLM; ``solve`` stands alone. Nothing is imported here, so
that a machine without a GPU can import the package and ask ``shape`` what would be served.
"""
