"""INT8 KV-cache attention on a Hopper GPU: producer (Triton), decode (CUDA C++ through NVRTC).

``layout`` <- {``producer``, ``decode``} <- {``check``, ``bench``}; ``tuning`` is data, ``nvrtc``
compiles and launches. Nothing here knows vLLM (``bench`` times it when it is installed), and
nothing is imported here, so that a machine without a GPU can import the package.
"""
