"""INT8 KV-cache attention on a Hopper GPU: cache write and prefix (Triton), decode (CUDA C++).

``layout``, ``tuning`` <- ``shape`` <- {``producer``, ``decode``, ``prefix``} <- ``check`` <-
``bench``; ``nvrtc`` compiles and launches for ``decode``, ``rivals`` are vLLM's own kernels for
``bench``. Nothing here knows a vLLM backend, and nothing is imported here, so that a machine
without a GPU can import the package and ask ``shape`` what would be served.
"""
