"""Native kernels for x86-64: the whole forward pass of a Llama over a paged KV pool, as one C call.

`build` makes the library where there is a compiler, `Library` loads it, `NativeModel` runs steps on it. The sources
are in `src/`: api.h is the interface, kernels.h the table of kernels that each variant (AVX512 with bfloat16 dot
products, AVX512, AVX2) fills in.
"""
