// Serves one call of the compiled kernels from standard input to standard output, so that a library
// for another processor can be run under an emulator (emulated.py, which writes the input).
//
//   emulated LIBRARY            the names of the instruction sets that this processor runs
//   emulated LIBRARY SET CALL   CALL is write_kv, first_chunk, prefix or decode
//
// Input: a Header, then every array, each as an int64 count of bytes and the bytes. Tensors are
// contiguous. Output: the cache that write_kv wrote, or the rows that the others attended.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

namespace {

struct Header {
  int64_t type, n_heads, n_kv_heads, head_dim, n_blocks, block_size, n_requests, table_width;
  double sm_scale;
};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  exit(1);
}

template <class T>
T read() {
  T x;
  if (fread(&x, sizeof x, 1, stdin) != 1) fail("the input ends early");
  return x;
}

std::vector<char> read_array() {
  std::vector<char> bytes(read<int64_t>());
  if (fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) fail("the input ends early");
  return bytes;
}

template <class... Arguments>
int call(void* library, const std::string& name, Arguments... arguments) {
  void* function = dlsym(library, name.c_str());
  if (!function) fail("no function " + name);
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

// The number of the wanted set; without one, prints the names of all that run here.
int find_set(void* library, const char* wanted) {
  auto name_of = reinterpret_cast<const char* (*)(int)>(dlsym(library, "kp_set_name"));
  for (int set = 0; set < call(library, "kp_n_sets"); ++set) {
    if (!call(library, "kp_set_supported", set)) continue;
    if (!wanted) puts(name_of(set));
    if (wanted && !strcmp(wanted, name_of(set))) return set;
  }
  if (!wanted) exit(0);
  fail(std::string("no set ") + wanted);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) fail("usage: emulated LIBRARY [SET CALL]");
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) fail(dlerror());
  const int set = find_set(library, argc == 4 ? argv[2] : nullptr);
  const std::string name = argv[3];

  const Header h = read<Header>();
  const int type = int(h.type), heads = int(h.n_heads), kv_heads = int(h.n_kv_heads);
  const int dim = int(h.head_dim), block_size = int(h.block_size), requests = int(h.n_requests);
  const float sm_scale = float(h.sm_scale);
  const int64_t page = h.block_size * (2 * h.head_dim + 8);
  const int64_t q_stride = h.n_heads * h.head_dim, kv_stride = h.n_kv_heads * h.head_dim;
  const int64_t head_stride = h.head_dim, block_stride = h.n_kv_heads * page;
  auto query = read_array(), key = read_array(), value = read_array(), cache = read_array();
  auto slots = read_array(), table = read_array(), starts = read_array(), lengths = read_array();
  std::vector<char> out(query.size());

  int status;
  if (name == "write_kv") {
    status = call(library, "kp_write_kv", set, key.data(), kv_stride, head_stride, value.data(),
                  kv_stride, head_stride, type, cache.data(), h.n_blocks, block_stride, page,
                  block_size, kv_heads, dim, slots.data(), int64_t(slots.size() / 8));
    out = cache;
  } else if (name == "first_chunk") {
    status = call(library, "kp_first_chunk", set, query.data(), q_stride, head_stride, type,
                  key.data(), kv_stride, head_stride, type, value.data(), kv_stride, head_stride,
                  type, starts.data(), requests, heads, kv_heads, dim, sm_scale, out.data(),
                  q_stride, head_stride, type);
  } else if (name == "prefix") {
    status = call(library, "kp_prefix", set, query.data(), q_stride, head_stride, type,
                  cache.data(), h.n_blocks, block_stride, page, block_size, kv_heads, dim,
                  table.data(), h.table_width, starts.data(), lengths.data(), requests, heads,
                  sm_scale, 32, out.data(), q_stride, head_stride, type);
  } else {
    status = call(library, "kp_decode", set, query.data(), q_stride, head_stride, type,
                  cache.data(), h.n_blocks, block_stride, page, block_size, kv_heads, dim,
                  table.data(), h.table_width, lengths.data(), requests, heads, sm_scale, 32,
                  out.data(), q_stride, head_stride, type);
  }
  if (status) fail("status " + std::to_string(status));
  fwrite(out.data(), 1, out.size(), stdout);
}
