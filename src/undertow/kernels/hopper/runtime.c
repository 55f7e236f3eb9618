/* What an object calls of the DSL's 43 MB runtime library: a CUDA error code becomes the RuntimeError of the call. */

typedef void (*raise_error)(const char *kind, const char **parts, int count);

extern const char *cudaGetErrorString(int code);

__attribute__((visibility("hidden")))
void CuteDSLRT_TVMFFISetRaisedCudaError(raise_error raise, int code)
{
    const char *parts[] = {"CUDA: ", cudaGetErrorString(code)};
    raise("RuntimeError", parts, 2);
}
