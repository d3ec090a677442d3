// Tests of the native core, with threads in place of processes so that a sanitizer sees all ranks:
// copies, sums, waits, lanes, lost peers.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#include "memory/deferred_work.hpp"
#include "kernels/copy.hpp"
#include "execute/binding.hpp"
#include "execute/executor.hpp"
#include "hosts/messages.hpp"
#include "hosts/regions.hpp"
#include "hosts/tcp.hpp"
#include "kernels/float16.hpp"
#include "kernels/experts.hpp"
#include "kernels/half_product.hpp"
#include "memory/signal_array.hpp"
#include "kernels/team.hpp"
#include "memory/transfers.hpp"

using namespace weft;

// In place of the system's: a call for more bytes than these is interrupted, again and again.
constexpr size_t kInterrupted = 32 << 20;
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  if (static_cast<size_t>(bytes) > kInterrupted) return EINTR;
  return fallocate(fd, 0, offset, bytes) ? errno : 0;
}

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition))                                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), std::abort(); \
  } while (0)

void copy_rows(char* dst, size_t dst_stride, const char* src, size_t src_stride, size_t rows,
               size_t row_bytes) {
  const Target target{dst, dst_stride, rows * row_bytes};
  copy_rows(&target, 1, src, src_stride, rows, row_bytes);
}

void test_copies() {
  std::mt19937 random(1);
  for (size_t bytes : {0, 1, 31, 33, 127, 4096, 9 << 20}) {
    for (int shift = 0; shift < 3; ++shift) {
      std::vector<char> src(bytes + 64), dst(bytes + 64, 7);
      for (auto& x : src) x = static_cast<char>(random());
      copy_rows(dst.data() + shift, bytes, src.data() + 2 * shift, bytes, 1, bytes);
      CHECK(!std::memcmp(dst.data() + shift, src.data() + 2 * shift, bytes));
      for (int i = 0; i < shift; ++i) CHECK(dst[i] == 7);
      for (size_t i = bytes + shift; i < dst.size(); ++i) CHECK(dst[i] == 7);
    }
  }
  std::vector<char> src(1000), dst(1000, 0);
  for (auto& x : src) x = static_cast<char>(random());
  copy_rows(dst.data(), 20, src.data(), 30, 10, 13);
  for (int row = 0; row < 10; ++row)
    for (int i = 0; i < 20; ++i) CHECK(dst[row * 20 + i] == (i < 13 ? src[row * 30 + i] : 0));
}

void test_several_targets() {
  std::mt19937 random(3);
  for (size_t bytes : {1, 100, 70'000, 2 << 20, 5 << 20}) {
    std::vector<char> src(bytes), one(bytes + 8), other(bytes + 8);
    for (auto& x : src) x = static_cast<char>(random());
    Target targets[] = {{one.data() + 3, bytes, bytes},
                        {src.data(), bytes, 0},
                        {other.data() + 1, bytes, 3 * bytes, Reader::peers}};
    std::vector<char> wanted = src;  // the source may be a target, too
    for (int time = 0; time < 4; ++time) {
      copy_rows(targets, 3, src.data(), bytes, 1, bytes);
      CHECK(src == wanted && !std::memcmp(one.data() + 3, wanted.data(), bytes) &&
            !std::memcmp(other.data() + 1, wanted.data(), bytes));
      std::memset(other.data(), time, other.size());
    }
  }
}

void test_transposing() {
  constexpr size_t rows = 70, columns = 131;
  std::vector<uint32_t> src(rows * columns), dst(rows * columns);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<uint32_t>(i);
  StridedCopy(reinterpret_cast<char*>(dst.data()), reinterpret_cast<char*>(src.data()), 4,
              {rows, columns}, {1, rows}, {columns, 1})
      .run();
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c) CHECK(dst[c * rows + r] == src[r * columns + c]);
}

// Reduce the other operands into the first one, which is part of `total_bytes` written bytes, and
// copy the result to more targets.
void reduce(Combine combine, const std::vector<Rows>& operands, size_t rows, size_t columns,
            int ranks, size_t total_bytes = 0, const Target* copies = nullptr, size_t count = 0) {
  std::vector<Target> targets{
      {const_cast<char*>(operands[0].base), operands[0].stride, total_bytes}};
  targets.insert(targets.end(), copies, copies + count);
  reduce_rows(combine, operands[0].dtype, {operands.begin() + 1, operands.end()}, rows, columns,
              ranks, targets.data(), targets.size());
}

void test_sums() {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-1, 1);
  constexpr size_t rows = 3, columns = 2500;
  // the sum, then its terms
  std::vector<std::vector<float>> all(5, std::vector<float>(rows * columns));
  std::vector<Rows> places;
  for (auto& numbers : all) {
    for (auto& x : numbers) x = uniform(random);
    places.push_back({reinterpret_cast<char*>(numbers.data()), columns * 4, Dtype::float32});
  }
  reduce(Combine::sum, places, rows, columns, 4);
  for (size_t i = 0; i < rows * columns; ++i)
    CHECK(all[0][i] == ((all[1][i] + all[2][i]) + all[3][i]) + all[4][i]);
  std::vector<float> copy(rows * columns);
  Target copies[] = {{reinterpret_cast<char*>(copy.data()), columns * 4, 0, Reader::owner},
                     {reinterpret_cast<char*>(all[2].data()), columns * 4, 0}};
  // a source is overwritten, once it has been read
  reduce(Combine::sum, places, rows, columns, 4, 0, copies, 2);
  CHECK(copy == all[0] && all[2] == all[0]);
  const std::vector<float> one_before = all[3];
  // of two sources, into other memory and in place
  reduce(Combine::sum, {places[0], places[3], places[4]}, rows, columns, 2);
  reduce(Combine::max, {places[3], places[3], places[4]}, rows, columns, 2);
  for (size_t i = 0; i < rows * columns; ++i)
    CHECK(all[0][i] == one_before[i] + all[4][i] &&
          all[3][i] == std::max(one_before[i], all[4][i]));
  size_t many = (size_t{9} << 20) / 4;  // written by non-temporal stores
  std::vector<float> left(many, 1), right(many, 2), total(many), twice(many);
  auto one_row = [&](std::vector<float>& x) {
    return Rows{reinterpret_cast<char*>(x.data()), many * 4, Dtype::float32};
  };
  Target again{reinterpret_cast<char*>(twice.data()), many * 4, 2 * many * 4};
  reduce(Combine::avg, {one_row(total), one_row(left), one_row(right)}, 1, many, 2, many * 4,
         &again, 1);
  for (size_t i = 0; i < many; ++i) CHECK(total[i] == 1.5f && twice[i] == 1.5f);
  uint16_t one = 0x3f80, tiny = 0x3b80, sum = 0, nan = 0x7fc1;  // bfloat16: 1, 1/256 and a NaN
  auto place = [](uint16_t& x) { return Rows{reinterpret_cast<char*>(&x), 2, Dtype::bfloat16}; };
  reduce(Combine::sum, {place(sum), place(one), place(tiny)}, 1, 1, 2);
  CHECK(sum == 0x3f80);  // a tie goes to even …
  reduce(Combine::sum, {place(sum), place(one), place(tiny), place(tiny)}, 1, 1, 3);
  CHECK(sum == 0x3f81);  // … but two of them are kept until the one rounding at the end
  reduce(Combine::sum, {place(sum), place(one), place(nan)}, 1, 1, 2);
  CHECK((sum & 0x7fff) > 0x7f80);
}

// Sums of integers that are too large wrap, as torch's do.
template <class T>
void test_wrapping_sums(Dtype dtype) {
  std::vector<T> most(100, std::numeric_limits<T>::max()), sum(100);
  auto rows = [&](std::vector<T>& x) {
    return Rows{reinterpret_cast<char*>(x.data()), x.size() * sizeof(T), dtype};
  };
  reduce(Combine::sum, {rows(sum), rows(most), rows(most)}, 1, most.size(), 2);
  CHECK(sum == std::vector<T>(100, -2));
  reduce(Combine::sum, {rows(sum), rows(most), rows(most), rows(most)}, 1, most.size(), 3);
  CHECK(sum == std::vector<T>(100, std::numeric_limits<T>::max() - 2));
}

// The conversion instructions of the processor and integer arithmetic give the same bits of 16-bit
// numbers.
void test_conversions() {
  auto rows = [](auto& x, Dtype dtype) {
    return Rows{reinterpret_cast<char*>(x.data()), 0, dtype};
  };
  std::vector<Float16> halves(65536), narrowed;
  std::vector<float> wide(halves.size()), numbers;
  for (uint32_t i = 0; i < halves.size(); ++i) halves[i].bits = static_cast<uint16_t>(i);
  reduce(Combine::sum, {rows(wide, Dtype::float32), rows(halves, Dtype::float16)}, 1, halves.size(),
         1);
  for (size_t i = 0; i < halves.size(); ++i)
    CHECK(bits_as<uint32_t>(wide[i]) == bits_as<uint32_t>(widen(halves[i])));
  std::mt19937 random(4);
  // each half, the middle to the next one, numbers close to both, and random bits
  for (float half : wide)
    for (uint32_t above : {0u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu, uint32_t(random())})
      numbers.push_back(bits_as<float>(bits_as<uint32_t>(half) + above));
  // subnormal and other tiny numbers
  for (uint32_t i = 0; i < 1 << 20; ++i) numbers.push_back(bits_as<float>(0x32000000u + i * 64));
  narrowed.resize(numbers.size());
  reduce(Combine::sum, {rows(narrowed, Dtype::float16), rows(numbers, Dtype::float32)}, 1,
         numbers.size(), 1);
  for (size_t i = 0; i < numbers.size(); ++i)
    CHECK(narrowed[i].bits == narrow<Float16>(numbers[i]).bits);
  CHECK(widen(Float16{0x3555}) == 0x1.554p-2f && narrow<Float16>(65519.f).bits == 0x7bff &&
        narrow<Float16>(65520.f).bits == 0x7c00);
}

// Random halves, one in eight of which has any bits: infinite, subnormal, or no number.
template <class Half>
std::vector<Half> random_halves(size_t n, std::mt19937& random) {
  std::vector<Half> all(n);
  for (Half& x : all) {
    x = narrow<Half>(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 256);
    if (random() % 8 == 0) x.bits = static_cast<uint16_t>(random());
  }
  return all;
}

// With relu all sums of small integers are exact, in any order; nothing is read or written beside
// the operands, whose memory is of their size.
template <class T>
void test_experts(Dtype dtype) {
  if (!half::columns()) return;
  std::mt19937 random(6);
  auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  auto number = [](int x) {
    if constexpr (std::is_same_v<T, float>)
      return static_cast<float>(x);
    else
      return narrow<T>(static_cast<float>(x));
  };
  auto integers = [&](size_t n) {
    std::vector<T> all(n);
    for (T& x : all) x = number(static_cast<int>(below(3)) - 1);
    return all;
  };
  auto value = [](T x) {
    if constexpr (std::is_same_v<T, float>)
      return x;
    else
      return widen(x);
  };
  for (int round = 0; round < 40; ++round) {
    const size_t tokens = below(40), count = below(4), width = 1 + below(round % 2 ? 5 : 80),
                 inner = 1 + below(round % 3 ? 40 : 5), top = 1 + below(3);
    const experts::Shape shape{dtype, count, width, inner};
    const auto x = integers(tokens * width), gate_up = integers(count * 2 * inner * width),
               down = integers(count * width * inner);
    std::vector<int64_t> chosen(tokens * top);
    std::vector<float> scores(tokens * top, 1.f);
    for (int64_t& each : chosen) each = static_cast<int64_t>(below(6)) - 1;
    std::vector<T> packed_gate_up(count * shape.gate_up_elements()),
        packed_down(count * shape.down_elements());
    auto bytes = [](auto& all) { return reinterpret_cast<char*>(all.data()); };
    auto read = [](const auto& all) { return reinterpret_cast<const char*>(all.data()); };
    experts::pack(shape, {read(gate_up), 2 * inner * width, width, 1},
                  {read(down), width * inner, inner, 1}, bytes(packed_gate_up), bytes(packed_down));
    std::vector<float> out(tokens * width, 7.f);
    experts::multiply({shape,
                       Dtype::float32,
                       bytes(packed_gate_up),
                       bytes(packed_down),
                       half::Activation::relu,
                       1,
                       {read(chosen), top, true, scores.data(), top, top},
                       read(x),
                       width,
                       bytes(out),
                       width,
                       tokens});
    for (size_t token = 0; token < tokens; ++token) {
      std::vector<float> sum(width, 0.f);
      for (size_t choice = 0; choice < top; ++choice) {
        const int64_t expert = chosen[token * top + choice] - 1;
        if (expert < 0 || expert >= static_cast<int64_t>(count)) continue;
        for (size_t i = 0; i < inner; ++i) {
          float products[2] = {0, 0};
          for (size_t part = 0; part < 2; ++part)
            for (size_t k = 0; k < width; ++k)
              products[part] += value(x[token * width + k]) *
                                value(gate_up[((expert * 2 + part) * inner + i) * width + k]);
          // halves are rounded between the products where pairs of them are multiplied
          const float between = std::max(products[0], 0.f) * products[1];
          const float rounded =
              half::kernels_of_pairs(dtype) ? widen(narrow<BFloat16>(between)) : between;
          for (size_t k = 0; k < width; ++k)
            sum[k] += rounded * value(down[(expert * width + k) * inner + i]);
        }
      }
      for (size_t k = 0; k < width; ++k) CHECK(out[token * width + k] == sum[k]);
    }
  }
}

// Each element is one sum of fused multiply-adds in order, whatever the layout and number of rows.
template <class Half>
void test_half_products(Dtype dtype) {
  if (!half::columns()) return;
  std::mt19937 random(5);
  auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (int round = 0; round < 150; ++round) {
    const size_t rows = below(30), depth = below(round % 2 ? 5 : 200), columns = below(150);
    const size_t x_stride = depth + below(3), out_stride = columns + below(3);
    const bool plain = below(2), biased = below(2);
    const size_t row_stride = plain ? columns + below(3) : 1,
                 column_stride = plain ? 1 : depth + below(3);
    const auto x = random_halves<Half>(rows * x_stride, random);
    const auto weight =
        random_halves<Half>(plain ? depth * row_stride : columns * column_stride, random);
    std::vector<float> bias(columns);
    for (float& b : bias) b = static_cast<float>(below(100));
    const half::Matrix b{reinterpret_cast<const uint16_t*>(weight.data()), row_stride,
                         column_stride};
    std::vector<uint16_t> panels((columns / half::columns() + 1) * half::columns() * depth);
    half::pack_panels(b, depth, columns, panels.data());
    for (bool packed : {false, true}) {
      std::vector<float> wide(rows * out_stride, -1.f);
      std::vector<Half> narrowed(rows * out_stride, Half{7});
      auto product = [&](Dtype out_dtype, auto& out) {
        half::multiply(
            {dtype, out_dtype, reinterpret_cast<const uint16_t*>(x.data()), x_stride,
             reinterpret_cast<char*>(out.data()), out_stride, biased ? bias.data() : nullptr,
             packed ? half::Matrix{panels.data(), 0, 0} : b, packed, rows, depth, columns});
      };
      product(Dtype::float32, wide);
      product(dtype, narrowed);
      for (size_t row = 0; row < rows; ++row)
        for (size_t column = 0; column < out_stride; ++column) {
          const float found = wide[row * out_stride + column];
          const uint16_t half = narrowed[row * out_stride + column].bits;
          float sum = 0;
          for (size_t k = 0; column < columns && k < depth; ++k)
            sum = std::fma(widen(x[row * x_stride + k]),
                           widen(weight[k * row_stride + column * column_stride]), sum);
          if (biased && column < columns) sum += bias[column];
          if (column >= columns)
            CHECK(found == -1 && half == 7);
          else if (sum != sum)
            CHECK(found != found && widen(Half{half}) != widen(Half{half}));
          else
            CHECK(bits_as<uint32_t>(found) == bits_as<uint32_t>(sum) &&
                  half == narrow<Half>(sum).bits);
        }
    }
  }
}

// The functions of an OpenMP library by which teams run, but with threads that a sanitizer tracks.
thread_local int team_number = 0, team_count = 1;
std::atomic<int> regions{0};

extern "C" {
int omp_get_thread_num() { return team_number; }
int omp_get_num_threads() { return team_count; }
int omp_get_max_threads() { return 1; }
void GOMP_parallel(void (*run)(void*), void* argument, unsigned threads, unsigned) {
  auto take_part = [=](int number) {
    team_number = number, team_count = static_cast<int>(threads), run(argument), team_number = 0,
    team_count = 1;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(take_part, i);
  take_part(0);
  for (auto& thread : others) thread.join();
  ++regions;
}
}

// Any number of threads gives the result of one thread, and writes nothing between or next to the
// rows.
void test_teams() {
  std::mt19937 random(5);
  std::vector<char> a(300'000), b(a.size());
  for (auto* bytes : {&a, &b})
    for (size_t i = 0; i < bytes->size(); i += 4) {
      const float x = std::ldexp(static_cast<float>(random()) - 0x1p31f, -31);
      std::memcpy(bytes->data() + i, &x, 4);
    }
  std::vector<char> made(24 * 400'000), alone;
  auto everything = [&] {
    std::memset(made.data(), 7, made.size());
    size_t used = 0;
    auto next = [&] { return made.data() + 400'000 * used++; };
    for (size_t bytes : {kShared - 1, kShared, kShared + 65})
      copy_rows(next() + 5, bytes, a.data() + 3, bytes, 1, bytes);
    copy_rows(next() + 1, 1200, a.data() + 2, 1003, 290, 1001);  // rows with gaps, many or few
    copy_rows(next(), 110'000, a.data(), 95'000, 3, 90'001);
    Target targets[] = {{next(), 999, 0}, {next() + 9, 1200, size_t{9} << 20}};
    copy_rows(targets, 2, b.data(), 1000, 290, 999);
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::float16, Dtype::int8})
      for (size_t gap : {0, 3}) {
        const size_t item = size_of(dtype), columns = 17'001 / item, rows = 17,
                     stride = (columns + gap) * item;
        Target copy{next() + 8, columns * item, gap << 22};
        reduce(Combine::sum,
               {{next() + 16, stride, dtype}, {a.data(), stride, dtype}, {b.data(), stride, dtype}},
               rows, columns, 2, gap << 22, &copy, 1);
      }
    char* over = next();
    std::memcpy(over, a.data(), a.size());
    StridedCopy(over + 999, over, 1, {a.size() - 999}, {1}, {1}).run();  // onto itself
    CHECK(used == 24);
  };
  auto strided = [&] {
    std::memset(made.data(), 7, made.size());
    StridedCopy(made.data(), a.data(), 4, {300, 250}, {1, 300}, {250, 1}).run();  // transposed
    StridedCopy(made.data() + 400'000, a.data(), 2, {3, 5, 9'001}, {45'010, 9'002, 1},
                {9'001, 27'003, 1})
        .run();
    StridedCopy(made.data() + 800'000, a.data(), 1, {2, 149'001}, {150'000, 1}, {149'003, 1}).run();
  };
  for (auto make : {std::function<void()>(everything), std::function<void()>(strided)}) {
    set_team_size(1);
    make();
    alone = made;
    const int before = regions;
    for (size_t threads : {2, 3, 8}) {
      set_team_size(threads);
      make();
      CHECK(!std::memcmp(alone.data(), made.data(), made.size()));
      // functions cannot be looked up in a program that is linked statically
      CHECK(regions > before || team_size() == 1);
    }
  }
  set_team_size(0);
}

constexpr int64_t kTimeout = 20'000'000'000;

struct Host {  // ranks as threads of one process
  std::vector<std::shared_ptr<Mesh>> meshes;
  std::vector<std::shared_ptr<Segment>> controls, data;
  std::vector<std::unique_ptr<Executor>> executors;

  // `apart`: ranks are on hosts of their own, so that none reads another's control segment.
  Host(int ranks, size_t bytes, bool apart = false) {
    std::vector<std::vector<int>> fds(ranks, std::vector<int>(ranks, -1));
    for (int i = 0; i < ranks; ++i)
      for (int j = 0; j < i; ++j) {
        int pair[2];
        CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
        fds[i][j] = pair[0], fds[j][i] = pair[1];
      }
    auto parts = [&](size_t size) {
      std::vector<std::shared_ptr<Mapping>> all;
      for (int i = 0; i < ranks; ++i) all.push_back(Mapping::create(size).first);
      return all;
    };
    auto control = parts(Executor::control_bytes(ranks)), memory = parts(bytes);
    for (int i = 0; i < ranks; ++i) {
      meshes.push_back(std::make_shared<Mesh>(fds[i]));
      if (apart) control = parts(Executor::control_bytes(ranks));
      controls.push_back(std::make_shared<Segment>(control, i));
      data.push_back(std::make_shared<Segment>(memory, i));
      executors.push_back(std::make_unique<Executor>(meshes[i], controls[i], i ? 100 : 0));
    }
  }
};

Instruction signal(Op op, Counter& counter, uint32_t index, int source, uint64_t count) {
  Instruction i{op, {}};
  i.counter = &counter, i.index = index, i.source = source, i.count = count;
  return i;
}

// A push all-gather of one row of `n` numbers, with a signal when a row is free again: lane 0 waits
// and checks, lane 1 sends.
void test_lanes(int ranks, int calls) {
  constexpr int n = 1000;
  Host host(ranks, ranks * n * sizeof(int));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      Executor& executor = *host.executors[r];
      std::vector<int> own(n);
      Program program("test", 2, {}, ranks);
      program.rank = r;
      auto arrived = [&](int source) { return static_cast<uint32_t>(source); };
      auto free = [&](int source) { return static_cast<uint32_t>(ranks + source); };
      for (int p = 0; p < ranks; ++p)
        if (p != r)
          program.lanes[1].push_back(signal(Op::wait, executor.counter(r, free(p)), free(p), p, 0));
      for (int p = 0; p < ranks; ++p) {
        program.lanes[1].push_back(
            {Op::copy, {{uint32_t(1 + p), uint32_t(r), uint32_t(r + 1)}, {0, 0, 1}}});
        if (p == r) continue;
        program.lanes[1].push_back(signal(Op::notify, executor.counter(p, arrived(r)), 0, 0, 0));
        program.lanes[0].push_back(
            signal(Op::wait, executor.counter(r, arrived(p)), arrived(p), p, 1));
        program.growth.push_back({arrived(p), 1});
        program.growth.push_back({free(p), 1});
      }
      program.lanes[0].push_back({Op::pause, {}});
      for (int p = 0; p < ranks; ++p)
        if (p != r)
          program.lanes[0].push_back(signal(Op::notify, executor.counter(p, free(r)), 0, 0, 0));
      program.layouts = {{0}, {}};  // a block of the caller's, and a row from each rank
      program.layouts[1].assign(ranks, Buffer::kRow);
      program.pieces = {1};
      program.buffers = {{"own", "int32", sizeof(int), Role::input, 0, false, false,
                          std::vector<uint32_t>(ranks, 0)},
                         {"inbox", "int32", sizeof(int), Role::output, 1, false, true,
                          std::vector<uint32_t>(ranks, 1)}};
      program.slots = {{r, 0}};
      std::vector<uintptr_t> parts;
      for (int p = 0; p < ranks; ++p) {
        program.slots.push_back({p, 1});
        parts.push_back(reinterpret_cast<uintptr_t>(host.data[r]->parts[p]->base()));
      }
      const size_t row = n * sizeof(int);
      Binding binding(program, {1},
                      {{0, reinterpret_cast<uintptr_t>(own.data()), 1, n, row, {}, ""},
                       {1, parts[r], size_t(ranks), n, row, parts, ""}});
      program.execution.binding = &binding;
      executor.tracing = r == 0;
      for (int call = 0; call < calls; ++call) {
        for (int i = 0; i < n; ++i) own[i] = call * 1000 + r * 10 + i;
        executor.begin(program, kTimeout);
        executor.lane_thread.start({&program, 1});
        int at = executor.run(program, 0, 0);
        CHECK(at >= 0);
        const int* all = reinterpret_cast<const int*>(parts[r]);
        for (int p = 0; p < ranks; ++p)
          if (p != r)
            CHECK(all[p * n] == call * 1000 + p * 10 &&
                  all[p * n + n - 1] == call * 1000 + p * 10 + n - 1);
        CHECK(executor.run(program, 0, at + 1) >= 0);
        executor.lane_thread.join(program);
      }
    });
  for (auto& thread : threads) thread.join();
}

// Ranks that synchronize, four of them in two levels, and read each other's eager buffers, of which
// no signal reports that they are free. Two ranks swap theirs in every second pair of executions.
void test_eager(int ranks, int calls) {
  constexpr int n = 500;
  Host host(ranks, 64);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      Executor& executor = *host.executors[r];
      std::vector<int> own(n), all(ranks * n);
      Program program("eager", 1, {}, ranks);
      program.rank = r, program.eager = true;
      auto& lane = program.lanes[0];
      lane.push_back({Op::copy, {{uint32_t(1 + r), 0, 1}, {0, 0, 1}}});
      for (int step = 1; step < ranks; step *= 2) {
        const int peer = r ^ step;
        lane.push_back(signal(Op::notify, executor.counter(peer, r), 0, 0, 0));
        lane.push_back(signal(Op::wait, executor.counter(r, peer), peer, peer, 1));
        program.growth.push_back({peer, 1});
      }
      const uint32_t out = 1 + ranks;
      for (int p = 0; p < ranks; ++p)
        lane.push_back({Op::copy, {{out, uint32_t(p), uint32_t(p + 1)}, {uint32_t(1 + p), 0, 1}}});
      program.layouts = {{0}, {}};
      program.layouts[1].assign(ranks, Buffer::kRow);
      program.pieces = {1};
      program.buffers = {{"own", "int32", sizeof(int), Role::input, 0, false, false,
                          std::vector<uint32_t>(ranks, 0)},
                         {"eager", "int32", sizeof(int), Role::eager, 0, false, true,
                          std::vector<uint32_t>(ranks, 0)},
                         {"all", "int32", sizeof(int), Role::output, 2, false, false,
                          std::vector<uint32_t>(ranks, 1)}};
      program.slots = {{r, 0}};
      for (int p = 0; p < ranks; ++p) program.slots.push_back({p, 1});
      program.slots.push_back({r, 2});
      const size_t row = n * sizeof(int);
      Binding binding(
          program, {1},
          {{0, reinterpret_cast<uintptr_t>(own.data()), 1, n, row, {}, ""},
           {2, reinterpret_cast<uintptr_t>(all.data()), size_t(ranks), n, row, {}, ""}});
      CHECK(!binding.workspace() && binding.eager() >= row);
      binding.place(Role::eager, executor.eager_bases());
      program.execution.binding = &binding;
      for (int call = 0; call < calls; ++call) {
        for (int i = 0; i < n; ++i) own[i] = call * 1000 + r * 10 + i;
        executor.begin(program, kTimeout);
        CHECK(executor.run(program, 0, 0) >= 0);
        for (int p = 0; p < ranks; ++p)
          CHECK(all[p * n] == call * 1000 + p * 10 &&
                all[p * n + n - 1] == call * 1000 + p * 10 + n - 1);
      }
    });
  for (auto& thread : threads) thread.join();
}

// An all-gather of one row of `n` numbers by ranks on hosts of their own, some of which are late. A
// rank's second lane, on the lane thread, sends the second half of the row.
void test_network(int ranks, int calls, int n) {
  Host host(ranks, 64, true);
  std::vector<std::vector<int>> fds(ranks, std::vector<int>(ranks, -1));
  for (int i = 0; i < ranks; ++i)
    for (int j = 0; j < i; ++j) {
      int pair[2];
      CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
      fds[i][j] = pair[0], fds[j][i] = pair[1];
    }
  std::vector<std::shared_ptr<Network>> networks;
  for (int r = 0; r < ranks; ++r) {
    networks.push_back(host.executors[r]->connect(ranks, [&](Transport::Receiver& receiver) {
      return std::make_unique<TcpTransport>(ranks, receiver);
    }));
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      Executor& executor = *host.executors[r];
      std::vector<int> own(2 * n), all(2 * ranks * n);
      Program program("network", 2, {}, ranks);
      program.rank = r;
      const auto arrived = [&](int source) { return static_cast<uint32_t>(source); };
      const auto sent = [&](int to) { return static_cast<uint32_t>(ranks + to); };
      for (int p = 0; p < ranks; ++p) {
        if (p == r) continue;
        for (uint8_t lane = 0; lane < 2; ++lane) {
          const uint32_t number = static_cast<uint32_t>(program.batches.size());
          const uint32_t index = sent(p) + lane * ranks;
          program.batches.push_back({&program,
                                     number,
                                     p,
                                     lane,
                                     {{true, {0, lane, lane + 1u}, {}}, {}},
                                     &executor.counter(r, index)});
          Instruction send{Op::send, {}};
          send.index = number;
          program.lanes[lane].push_back(send);
          program.lanes[lane].push_back(signal(Op::wait, executor.counter(r, index), index, r, 1));
          program.growth.push_back({index, 1});
          auto channel = std::make_shared<Network::Channel>();
          channel->sender = p, channel->lane = lane, channel->gate = {r};
          channel->raised = {{}, {&executor.counter(r, arrived(p))}};
          channel->packed.resize(channel->raised.size());
          const uint32_t from = static_cast<uint32_t>(2 * p + lane);
          program.arrivals.push_back({channel, {{true, {1, from, from + 1}, {}}, {}}});
        }
        program.growth.push_back({arrived(p), 2});
      }
      for (int p = 0; p < ranks; ++p)
        if (p != r)
          program.lanes[0].push_back(
              signal(Op::wait, executor.counter(r, arrived(p)), arrived(p), p, 2));
      program.mark_arrivals();
      program.layouts = {{0, 0}, {}};
      program.layouts[1].assign(2 * ranks, 0);
      program.pieces = {1};
      program.buffers = {{"own", "int32", sizeof(int), Role::input, 0, false, false,
                          std::vector<uint32_t>(ranks, 0)},
                         {"all", "int32", sizeof(int), Role::output, 1, false, false,
                          std::vector<uint32_t>(ranks, 1)}};
      program.slots = {{r, 0}, {r, 1}};
      const size_t row = n * sizeof(int);
      Binding binding(program, {1},
                      {{0, reinterpret_cast<uintptr_t>(own.data()), 2, size_t(n), row, {}, ""},
                       {1,
                        reinterpret_cast<uintptr_t>(all.data()),
                        size_t(2 * ranks),
                        size_t(n),
                        row,
                        {},
                        ""}});
      program.execution.binding = &binding;
      for (int call = 0; call < calls; ++call) {
        for (int i = 0; i < 2 * n; ++i) own[i] = call * 1000 + r * 10 + i;
        if ((call + r) % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        executor.begin(program, kTimeout);
        executor.lane_thread.start({&program, 1});
        CHECK(executor.run(program, 0, 0) >= 0);
        executor.lane_thread.join(program);
        for (int p = 0; p < ranks; ++p)
          for (int i = 0; p != r && i < 2 * n; i += 2 * n - 1)
            CHECK(all[2 * p * n + i] == call * 1000 + p * 10 + i);
      }
      networks[r]->finish(20, 20);
      for (int p = 0; p < ranks; ++p) CHECK(p == r || networks[r]->ended(p));
    });
  for (int r = 0; r < ranks; ++r)  // while calls wait for it
    for (int p = 0; p < ranks; ++p)
      if (p != r) networks[r]->connect(p, fds[r][p]);
  for (auto& thread : threads) thread.join();
  for (auto& network : networks) {
    for (const Trouble& trouble : network->troubles()) CHECK(trouble.kind == Trouble::unconnected);
    network->abort();
    network->stop();
  }
}

std::array<int, 2> pair_of_sockets() {
  std::array<int, 2> made;
  CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, made.data()));
  return made;
}

// The ends of a connection that takes some MiB at once.
std::array<int, 2> large_connection() {
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const auto at = reinterpret_cast<sockaddr*>(&address);
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
            one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), bytes = 8 << 20;
  CHECK(!bind(server, at, size) && !listen(server, 1) && !getsockname(server, at, &size));
  CHECK(!connect(one, at, size));
  setsockopt(one, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
  const int other = accept4(server, nullptr, nullptr, SOCK_CLOEXEC);
  close(server);
  return {one, other};
}

// Receive and send all that can be.
void drive(TcpTransport& transport) {
  while (transport.progress(0)) {
  }
}

// Whether the kernel reads memory for a process here; an emulator of other processors does not.
bool memory_can_be_read() {
  const int64_t number = 42;
  int64_t found = 0;
  const auto from = reinterpret_cast<uintptr_t>(&number);
  return !read_memory(getpid(), from, 8, reinterpret_cast<char*>(&found), 8, 1, 8) && found == 42;
}

// Messages between all ranks, on one host or each on its own, received by tags in another order
// than that of sending; a rank has a thread that sends and one that receives. `readable`: long ones
// are read in the memory of their sender.
void test_messages(int ranks, bool apart, bool readable) {
  constexpr size_t kRing = 16 << 10, kNumber = 60;
  const size_t sizes[] = {8, 0, 100, 5000, 17 << 10, 300, size_t{3} << 20};
  Host host(ranks, Messages::bytes(ranks, kRing), apart);
  std::vector<std::shared_ptr<Messages>> all;
  std::vector<std::shared_ptr<Network>> networks(ranks);
  for (int r = 0; r < ranks; ++r) {
    if (apart)
      networks[r] = host.executors[r]->connect(ranks, [&](Transport::Receiver& receiver) {
        return std::make_unique<TcpTransport>(ranks, receiver);
      });
    auto parts = host.data[r]->parts;
    for (int p = 0; apart && p < ranks; ++p)
      if (p != r) parts[p] = nullptr;
    all.push_back(
        std::make_shared<Messages>(host.meshes[r], std::make_shared<Segment>(parts, r), kRing,
                                   std::vector<int>(ranks, readable ? getpid() : 0), r ? 100 : 0,
                                   networks[r], std::make_shared<DeferredWork>()));
  }
  for (int i = 0; apart && i < ranks; ++i)
    for (int j = 0; j < i; ++j) {
      const auto [here, there] = large_connection();
      networks[i]->connect(j, here);
      networks[j]->connect(i, there);
    }
  const auto never = [] { return false; };
  const auto byte = [](int from, int to, size_t number) {
    return static_cast<char>(17 * from + 5 * to + number);
  };
  const auto size = [&](size_t number) { return sizes[number % std::size(sizes)]; };
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      std::vector<std::vector<char>> data;
      std::vector<MessagePtr> sent;
      for (size_t k = 0; k < kNumber; ++k)
        for (int p = 0; p < ranks; ++p) {
          if (p == r) continue;
          data.emplace_back(size(k), byte(r, p, k));
          sent.push_back(all[r]->send(data.back().data(), size(k), p, static_cast<int>(k % 3)));
        }
      for (const MessagePtr& each : sent)
        CHECK(all[r]->wait(*each, kTimeout, never) == WaitStatus::none);
    });
    threads.emplace_back([&, r] {
      for (const int tag : {2, 0, 1})
        for (size_t k = tag; k < kNumber; k += 3) {
          std::vector<std::vector<char>> places(ranks, std::vector<char>(size(k) + 1, 'x'));
          std::vector<MessagePtr> received;
          for (int p = 0; p < ranks; ++p)
            if (p != r) received.push_back(all[r]->receive(places[p].data(), size(k), p, tag));
          for (const MessagePtr& each : received) {
            CHECK(all[r]->wait(*each, kTimeout, never) == WaitStatus::none);
            const auto& place = places[each->source];
            CHECK(each->size == size(k) && place.back() == 'x');
            CHECK(std::all_of(place.begin(), place.end() - 1,
                              [&](char found) { return found == byte(each->source, r, k); }));
          }
        }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& network : networks)
    if (network) {
      for (const Trouble& trouble : network->troubles())
        CHECK(trouble.kind == Trouble::unconnected);
      network->abort();
      network->stop();
    }
}

// Puts, gets and notifications between hosts, of two threads of each rank at once: of rows, of
// transposed elements, and of more dimensions than a message describes, short and long.
void test_regions() {
  constexpr int kRanks = 2, kTimes = 12;
  constexpr uint64_t kMemory = 3, kCounters = 4;
  constexpr size_t kNumbers = size_t{1} << 20;  // of a thread
  const std::vector<std::vector<size_t>> shapes{
      {5}, {3000}, {700, 900}, {640, 512}, {2, 3, 2, 2, 2, 2, 2, 2, 2, 2, 3}, {40, 30, 20, 6}};
  Host host(kRanks, 64, true);
  std::vector<std::shared_ptr<Network>> networks;
  std::vector<std::unique_ptr<Regions>> regions;
  std::vector<std::shared_ptr<Mapping>> memory, counters;
  for (int r = 0; r < kRanks; ++r) {
    networks.push_back(host.executors[r]->connect(kRanks, [&](Transport::Receiver& receiver) {
      return std::make_unique<TcpTransport>(kRanks, receiver);
    }));
    regions.push_back(
        std::make_unique<Regions>(std::vector<int>{1 - r}, host.meshes[r], networks[r], r * 100));
    memory.push_back(Mapping::create(2 * kNumbers * sizeof(int)).first);
    counters.push_back(Mapping::create(2 * sizeof(Counter)).first);
    regions[r]->hold(kMemory, memory[r]);
    regions[r]->hold(kCounters, counters[r]);
  }
  const auto [here, there] = large_connection();
  networks[0]->connect(1, here);
  networks[1]->connect(0, there);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r)
    for (size_t half = 0; half < 2; ++half)
      threads.emplace_back([&, r, half] {
        const int peer = 1 - r;
        const Regions::Limit limit{kTimeout, [] { return false; }};
        for (int k = 0; k < kTimes; ++k) {
          const std::vector<size_t>& shape = shapes[(k + half) % shapes.size()];
          std::vector<size_t> strides(shape.size(), 1), padded(shape.size(), 1);
          size_t numbers = 1, span = 1;
          for (size_t i = shape.size(); i-- > 0;) {
            strides[i] = numbers, padded[i] = span;
            numbers *= shape[i], span *= shape[i] + (i > 0);
          }
          if (k % 3 == 2) std::reverse(padded.begin(), padded.end());  // across the rows
          span = 1;
          for (size_t i = 0; i < shape.size(); ++i) span += (shape[i] - 1) * padded[i];
          if (span > kNumbers || (k % 3 == 2 && may_repeat(shape, padded))) padded = strides;
          std::vector<int> own(numbers), got(numbers, -1);
          for (size_t i = 0; i < numbers; ++i) own[i] = static_cast<int>(i * 7 + k * 3 + r);
          const uint64_t offset = half * kNumbers * sizeof(int);
          const auto copy = [&](std::vector<int>& local) {
            return Regions::Copy{kMemory,     offset, reinterpret_cast<char*>(local.data()),
                                 sizeof(int), shape,  padded,
                                 strides};
          };
          const Regions::Change change{kCounters, false, {half, 1, 1}, 2};
          CHECK(regions[r]->put(peer, copy(own), change, limit).status == WaitStatus::none);
          CHECK(regions[r]->get(peer, copy(got), limit).status == WaitStatus::none);
          CHECK(own == got);
        }
        const Regions::Change both{kCounters, false, {0, 2, 1}, 1};
        CHECK(regions[r]->change(peer, both, limit).status == WaitStatus::none);
        CHECK(regions[r]->settle(Regions::kNobody, limit).status == WaitStatus::none);
      });
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < kRanks; ++r)
    for (size_t half = 0; half < 2; ++half)
      CHECK(reinterpret_cast<Counter*>(counters[r]->base())[half].value.load() == 2 * kTimes + 2);
  for (auto& network : networks) {
    CHECK(network->troubles().empty());
    network->abort();
    network->stop();
  }
}

// A wire with one message, which arrives when it is told to, and of which only the thread that
// drives hears.
class Wire : public Transport {
 public:
  Wire(int peer, Receiver& receiver)
      : peer_(peer), receiver_(receiver), bell_(eventfd(0, EFD_CLOEXEC)) {}
  ~Wire() override { disown(); }

  void arrive() { arrived_.store(true); }
  void connect(int, int, std::shared_ptr<const std::string>) override {}
  bool put(int, const Label&, const std::vector<Strided>&, size_t, std::function<void()>) override {
    return true;
  }
  void announce(int, std::shared_ptr<const std::string>) override {}
  std::string message(const Label&, std::string_view) const override { return {}; }
  bool poll() override { return progress(0); }
  bool progress(int) override {
    if (!arrived_.load()) return false;
    const Place place = receiver_.place(peer_, {Kind::rows, 0, 1, 7}, 0);
    waiting_.store(place.state == Place::later);
    if (waiting()) return false;
    arrived_.store(false);
    receiver_.raise(peer_);
    return true;
  }
  int descriptor() const override { return bell_; }
  bool waiting() const override { return waiting_.load(); }
  bool resumes() const override { return false; }
  bool unsent() const override { return false; }
  void wake() override {}
  void end(int) override {}
  void abort() override {}
  bool open(int) const override { return false; }
  void disown() override {
    if (bell_ >= 0) close(std::exchange(bell_, -1));
  }

 private:
  const int peer_;
  Receiver& receiver_;
  int bell_;
  std::atomic<bool> arrived_{false}, waiting_{false};
};

// Rows that must wait for another rank of this host are received once it has begun the call, also
// if a caller found them after the thread of the network had gone to sleep in spite of a nudge.
void test_rows_that_wait_for_a_rank_of_this_host() {
  Host host(3, 64);
  const Calls calls(host.controls[0]);
  Wire* wire = nullptr;
  Network network(0, 3, calls, host.meshes[0], [&](Transport::Receiver& receiver) {
    auto made = std::make_unique<Wire>(2, receiver);
    wire = made.get();
    return made;
  });
  Counter counter{};
  auto channel = std::make_shared<Network::Channel>();
  channel->sender = 2, channel->lane = 0, channel->gate = {0, 1};
  channel->raised = {{&counter}};
  channel->packed.resize(1);
  auto expected = network.blank(1);
  expected.front().channel = channel;
  expected.front().call = 1, expected.front().digest = 7;
  expected.front().places = {{}};
  const auto some_time = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  add(calls.under_way(0), 1);
  network.begin(1, CallText("test"), std::move(expected));
  some_time();  // the thread of the network finds nothing
  network.hand_over();
  wire->arrive();
  std::thread waits([&] {
    const auto never = [] { return false; };
    Deadline deadline(kTimeout);
    CHECK(network.wait_until(counter, 1, true, {0, 0}, kNoYield, deadline, never, never));
  });
  some_time();  // the waiting thread finds the rows
  add(calls.under_way(1), 1);
  waits.join();
  network.abort();
}

// A rank that two transports connect: its rows have a place once it has one.
struct Receiving : Transport::Receiver {
  Transport::Place place(int, const Label&, size_t) override {
    return rows.base ? Transport::Place{Transport::Place::here, rows} : Transport::Place{};
  }
  void raise(int) override { ++raised; }
  void announced(int, const Label&, std::string_view) override { ++calls; }
  void ended(int, const std::string& broken) override { ends += broken.empty(); }
  void garbled(int, const std::string&) override { CHECK(false); }

  Strided rows;
  int raised = 0, calls = 0, ends = 0;
};

struct Connected {
  explicit Connected(std::array<int, 2> sockets = pair_of_sockets()) {
    const auto nothing = std::make_shared<const std::string>();
    here.connect(1, sockets[0], nothing);
    there.connect(0, sockets[1], nothing);
    drive(here);
    drive(there);
  }

  Receiving at_here, at_there;
  TcpTransport here{2, at_here}, there{2, at_there};
};

// A message and the end behind it, of which one event tells.
void test_an_end_behind_a_message() {
  Connected ranks;
  ranks.there.announce(
      0, std::make_shared<const std::string>(ranks.there.message({Kind::call, 0, 1, 2}, "a call")));
  ranks.there.end(0);
  drive(ranks.here);
  CHECK(ranks.at_here.calls == 1);
  CHECK(ranks.at_here.ends == 1);
}

// More announcements than are sent in one turn, by a connection that takes them all: no event tells
// that the rest can be sent.
void test_a_long_announcement() {
  constexpr int kCalls = 6000;
  Connected ranks(large_connection());
  std::string messages;
  for (int call = 1; call <= kCalls; ++call)
    messages += ranks.here.message({Kind::call, 0, 1, 2}, std::string(512, 'x'));
  ranks.here.announce(1, std::make_shared<const std::string>(std::move(messages)));
  Deadline deadline(kTimeout);
  while (ranks.at_there.calls < kCalls && !deadline.passed()) {
    ranks.here.progress(0);
    ranks.there.progress(1);
  }
  CHECK(ranks.at_there.calls == kCalls);
}

// The end behind rows that have no place when an event tells of it, more than are read ahead.
void test_an_end_behind_rows_that_wait() {
  Connected ranks;
  static char sent[40 << 10], received[sizeof sent];
  std::memset(sent, 7, sizeof sent);
  CHECK(ranks.there.put(0, {Kind::rows, 0, 1, 2}, {{sent, 1, sizeof sent, sizeof sent}}, SIZE_MAX,
                        [] {}));
  drive(ranks.here);
  CHECK(ranks.here.waiting());
  ranks.there.end(0);
  drive(ranks.here);
  ranks.at_here.rows = {received, 1, sizeof received, sizeof received};
  drive(ranks.here);
  CHECK(ranks.at_here.raised == 1);
  CHECK(!std::memcmp(sent, received, sizeof sent));
  CHECK(ranks.at_here.ends == 1);
}

// Rows that have waited for a place are not received after an abort: R4 of the network.
void test_rows_that_wait_when_a_world_is_aborted() {
  Connected ranks;
  char sent[100], memory[sizeof sent] = {};
  std::memset(sent, 7, sizeof sent);
  CHECK(ranks.there.put(0, {Kind::rows, 0, 1, 2}, {{sent, 1, sizeof sent, sizeof sent}}, SIZE_MAX,
                        [] {}));
  drive(ranks.here);
  CHECK(ranks.here.waiting());
  ranks.here.abort();
  ranks.at_here.rows = {memory, 1, sizeof memory, sizeof memory};
  drive(ranks.here);
  CHECK(ranks.at_here.raised == 0);
  CHECK(std::count(memory, memory + sizeof memory, 0) == sizeof memory);
}

void test_a_wait_ends_early() {
  Host host(2, 64);
  Executor& executor = *host.executors[0];
  Program program("wait", 1, {}, 2), other("another", 1, {}, 2);
  program.lanes[0].push_back(signal(Op::wait, executor.counter(0, 1), 1, 1, 1));
  Execution& execution = program.execution;
  executor.begin(program, 1'000'000);
  CHECK(executor.run(program, 0, 0) == -1 && execution.failures[0].status == WaitStatus::timeout);
  host.executors[1]->begin(other, kTimeout);
  execution.timeout = kTimeout;
  CHECK(executor.run(program, 0, 0) == -1 && execution.failures[0].status == WaitStatus::mismatch);
  std::thread killer([&] {
    host.executors[1].reset();
    host.meshes[1]->abort({"KeyError", 1, "gone"});
    host.meshes[1].reset();
  });
  execution.digest = other.text.digest;
  CHECK(executor.run(program, 0, 0) == -1 && execution.failures[0].status == WaitStatus::failed);
  CHECK(host.meshes[0]->failure().kind == "KeyError" && host.meshes[0]->failure().culprit == 1);
  killer.join();
}

// An abort with a part of a message sent: the rest arrives, not from memory that is the caller's
// again, and is not taken for rows; then what was announced, and the end; what the peer sends is
// not received.
void test_an_abort_in_the_middle_of_a_message() {
  Connected ranks(large_connection());
  const size_t size = 32 << 20;  // more than the connection takes
  std::vector<char> sent(size, 7), received(size, 1);
  const auto never = [] { CHECK(false); };
  for (int i = 0; i < 2; ++i)
    CHECK(
        !ranks.here.put(1, {Kind::rows, 0, 1, 2}, {{sent.data(), 1, size, size}}, SIZE_MAX, never));
  const Label event{Kind::control, 0, 0, 0};
  ranks.here.announce(
      1, std::make_shared<const std::string>(ranks.here.message(event, std::string(9000, 'x'))));
  CHECK(ranks.there.put(0, {Kind::rows, 0, 1, 2}, {{sent.data(), 1, 99, 99}}, SIZE_MAX, [] {}));
  ranks.here.abort();
  std::fill(sent.begin(), sent.end(), 5);  // the caller's again
  ranks.at_there.rows = {received.data(), 1, size, size};
  Deadline deadline(kTimeout);
  while (!ranks.at_there.ends && !deadline.passed()) {
    ranks.here.progress(0);
    ranks.there.progress(1);
  }
  CHECK(ranks.at_there.raised == 0 && ranks.at_there.calls == 1 && ranks.at_there.ends == 1);
  const auto rest = std::find(received.begin(), received.end(), 0);
  CHECK(rest != received.begin() && rest != received.end());
  CHECK(std::count(received.begin(), rest, 7) == rest - received.begin());
  CHECK(std::count(rest, received.end(), 0) == received.end() - rest);
  CHECK(ranks.here.open(1) && !ranks.there.open(0));
  ranks.there.end(0);
  while (ranks.here.open(1) && !deadline.passed()) ranks.here.progress(1);
  CHECK(!ranks.here.open(1) && ranks.at_here.raised == 0);
}

// What a mesh passes on.
struct Told : Outside {
  void post(int rank, const std::string& event) override { posted.emplace_back(rank, event); }
  void left(int rank) override { leavers.push_back(rank); }
  void dropped(int rank, uint64_t memory) override { drops.emplace_back(rank, memory); }

  std::vector<std::pair<int, std::string>> posted;
  std::vector<int> leavers;
  std::vector<std::pair<int, uint64_t>> drops;
};

// Of two hosts, with ranks 0 to 2 and rank 3: each rank passes on the events of all of its host,
// also those before it was asked to, and none of elsewhere, of which it informs its host.
void test_events() {
  constexpr int kHere = 3;
  std::vector<std::vector<int>> fds(kHere, std::vector<int>(kHere + 1, -1));
  for (int i = 0; i < kHere; ++i) {
    fds[i][kHere] = Mesh::kElsewhere;
    for (int j = 0; j < i; ++j) {
      int pair[2];
      CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
      fds[i][j] = pair[0], fds[j][i] = pair[1];
    }
  }
  std::array<Told, kHere> told;
  std::deque<Mesh> meshes;
  for (const auto& each : fds) meshes.emplace_back(each);
  constexpr uint64_t kMany = 3000;  // far more than a socket holds, some of them unposted
  meshes[0].attach(&told[0]);
  for (uint64_t i = 0; i < kMany; ++i) meshes[1].drop(i);
  meshes[0].leave(true);
  meshes[1].attach(&told[1]);
  meshes[2].attach(&told[2]);
  for (int rank : {1, 2})
    while (!meshes[rank].left(0)) weft::pause();
  CHECK(meshes[0].acknowledged(20));
  uint64_t memory = kMany;
  std::string event = "d" + std::string(reinterpret_cast<char*>(&memory), sizeof memory);
  CHECK(meshes[1].deliver(3, event) && meshes[1].deliver(3, "f"));
  CHECK(meshes[1].deliver(3, "f"));  // once more, as a link rank that takes over sends it
  CHECK(!meshes[1].deliver(3, "d") && !meshes[1].deliver(3, "") && !meshes[1].deliver(2, "f"));
  for (auto& mesh : meshes)
    while (!mesh.left(3)) weft::pause();
  CHECK(meshes[1].gone(0) && !meshes[1].gone(3));
  meshes[1].leave(false);
  for (int rank : {0, 2})
    while (!meshes[rank].left(1)) weft::pause();
  meshes[2].abort({"KeyError", 2, "gone"});
  for (auto& mesh : meshes)
    while (!mesh.failed()) weft::pause();
  for (auto& mesh : meshes) mesh.close();
  for (int rank = 0; rank < kHere; ++rank) {
    std::vector<std::string> of[kHere + 1];
    for (const auto& [from, what] : told[rank].posted) of[from].push_back(what);
    CHECK(of[0] == std::vector<std::string>{"fg"} && of[3].empty());
    CHECK(of[2] == std::vector<std::string>{"aKeyError\n2\ngone"});
    CHECK(of[1].size() == kMany + 1 && of[1].back() == "f");
    for (memory = 0; memory < kMany; ++memory)
      CHECK(!std::memcmp(of[1][memory].data() + 1, &memory, sizeof memory));
    CHECK(std::count(told[rank].leavers.begin(), told[rank].leavers.end(), 3) == 1);
    CHECK((told[rank].drops == std::vector<std::pair<int, uint64_t>>{{3, kMany}}));
  }
}

// A lane that ends early ends all waits of its rank's other lanes.
void test_lanes_end_together() {
  // lane 0 waits for its own rank's lane 1, or for a peer that has not left
  for (int source : {0, 2}) {
    Host host(3, 64);
    Executor& executor = *host.executors[0];
    Program program("wait", 2, {}, 3);
    program.lanes[0].push_back(signal(Op::wait, executor.counter(0, 4), 4, source, 1));
    program.lanes[1].push_back(signal(Op::wait, executor.counter(0, 1), 1, 1, 1));
    Execution& execution = program.execution;
    executor.begin(program, INT64_MAX / 4);
    executor.lane_thread.start({&program, 1});
    host.meshes[1]->leave(false);
    CHECK(executor.run(program, 0, 0) == -1 && execution.failures[0].status == WaitStatus::lane);
    CHECK(execution.stopped == 1 && execution.failures[1].status == WaitStatus::left &&
          execution.failures[1].source == 1);
    executor.lane_thread.join(program);
    executor.begin(program, 1'000'000);
    // the end of the previous call has no effect
    CHECK(executor.run(program, 0, 0) == -1 && execution.failures[0].status == WaitStatus::timeout);
  }
}

// A peer may raise a counter and leave after a wait has read the counter and before it checks
// whether the peer has left.
void test_increments_before_leaving_count() {
  Counter counter{};
  auto never = [] { return false; };
  auto raise_and_leave = [&] { return add(counter, 1), true; };
  auto wait_for = [&](uint64_t value) {
    Deadline deadline(kTimeout);
    return wait_until(counter, Compare::greater_equal, value, 0, deadline, never, raise_and_leave);
  };
  CHECK(wait_for(1));
  CHECK(!wait_for(3));
}

// Random shapes, orders and gaps of dimensions, compared with copies of single elements; memory
// between the elements is unchanged.
void test_strided_copies() {
  std::mt19937 random(3);
  auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (int round = 0; round < 2000; ++round) {
    size_t item = size_t{1} << below(5), dimensions = below(5);
    std::vector<size_t> shape(dimensions);
    for (auto& size : shape) size = below(5);
    auto strides = [&] {
      std::vector<size_t> order(dimensions), result(dimensions);
      for (size_t i = 0; i < dimensions; ++i) order[i] = i;
      if (below(2)) std::shuffle(order.begin(), order.end(), random);
      size_t stride = 1 + (below(4) == 0);
      for (size_t i = dimensions; i-- > 0;
           stride *= std::max<size_t>(shape[order[i]], 1) + (below(4) == 0))
        result[order[i]] = stride;
      return result;
    };
    auto to = strides(), from = strides();
    auto span = [&](const std::vector<size_t>& strides) {
      return span_of(item, dimensions, shape.data(), strides.data());
    };
    std::vector<char> src(span(from) + 8), dst(span(to) + 8, 7);
    for (auto& x : src) x = static_cast<char>(random());
    size_t shift = below(3), total = 1;
    std::vector<char> expected = dst;
    for (size_t size : shape) total *= size;
    for (size_t n = 0; n < total; ++n) {
      size_t rest = n, d = 0, s = 0;
      for (size_t i = 0; i < dimensions; rest /= shape[i++])
        d += rest % shape[i] * to[i], s += rest % shape[i] * from[i];
      std::memcpy(expected.data() + shift + d * item, src.data() + shift + s * item, item);
    }
    StridedCopy(dst.data() + shift, src.data() + shift, item, shape, to, from).run();
    CHECK(dst == expected);
  }
  std::vector<int> overlapping(100);
  for (int i = 0; i < 100; ++i) overlapping[i] = i;
  char* base = reinterpret_cast<char*>(overlapping.data());
  StridedCopy(base + 4, base, 4, {3, 20}, {30, 1}, {20, 1}).run();
  for (int i = 0; i < 60; ++i) CHECK(overlapping[1 + i / 20 * 30 + i % 20] == i);
  StridedCopy(nullptr, nullptr, 4, {3, 0}, {0, 1}, {0, 1}).run();
}

// A tile that does not divide the bytes: each passes through it once, in order.
void test_copies_in_tiles() {
  std::mt19937 random(8);
  std::vector<char> src(10'000), dst(10'008, 7), tile(768);
  for (auto& x : src) x = static_cast<char>(random());
  const StridedCopy copy(dst.data() + 4, src.data(), 2, {50, 100}, {100, 1}, {100, 1});
  copy.through(tile.data(), tile.size()).run();
  CHECK(!std::memcmp(dst.data() + 4, src.data(), src.size()) && dst[3] == 7 && dst[10'004] == 7);
  CHECK(!std::memcmp(tile.data(), src.data() + 9'984, 16) &&
        !std::memcmp(tile.data() + 16, src.data() + 9'232, 752));
  const StridedCopy rows(dst.data(), src.data(), 2, {50, 90}, {100, 1}, {100, 1}),
      moved(src.data() + 2, src.data(), 2, {4'000}, {1}, {1});
  for (const StridedCopy& refused : {rows, moved}) {
    bool thrown = false;
    try {
      refused.through(tile.data(), tile.size());
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

// Two threads submit more transfers than may be outstanding; each transfer reads the data that the
// previous one wrote.
void test_transfers() {
  Host host(2, 64);
  constexpr int n = 5000;
  std::vector<std::vector<uint64_t>> chains(2, std::vector<uint64_t>(n + 1));
  Transfers transfers(host.meshes[0], 100);
  std::vector<std::thread> threads;
  for (auto& chain : chains)
    threads.emplace_back([&] {
      chain[0] = 42;
      uint64_t last = 0;
      for (int i = 0; i < n; ++i) {
        char* at = reinterpret_cast<char*>(&chain[i]);
        uint64_t number =
            transfers.submit(StridedCopy(at + 8, at, 8, {1}, {1}, {1}), [] { return false; });
        CHECK(number > last);
        last = number;
      }
      CHECK(transfers.wait(last, Deadline(20'000'000'000), [] { return false; }) &&
            transfers.done(last) && !transfers.refused(last));
      for (uint64_t x : chain) CHECK(x == 42);
    });
  for (auto& thread : threads) thread.join();
  CHECK(!transfers.wait(chains.size() * n + 1, Deadline(1'000'000), [] { return false; }));
  host.meshes[1]->abort({"KeyError", 1, "gone"});
  while (!host.meshes[0]->failed()) weft::pause();
  uint64_t source = 1, target = 0;
  StridedCopy copy(reinterpret_cast<char*>(&target), reinterpret_cast<char*>(&source), 8, {1}, {1},
                   {1});
  uint64_t late = transfers.submit(copy, [] { return false; });
  transfers.finish();
  CHECK(transfers.done(late) && transfers.refused(late) && !transfers.refused(late - 1) &&
        target == 0 && !transfers.copy(copy));
}

// Memory is allocated where a timer interrupts every call that takes long, which older kernels
// undo.
void test_allocation_under_a_timer() {
  constexpr size_t kSize = 3 * kInterrupted;
  const auto [mapping, file] = Mapping::create(kSize);
  std::memset(mapping->base(), 1, kSize);
}

// A producer and a consumer use a slot alternately. It is plain memory, so a sanitizer detects
// accesses without an order.
void test_signal_arrays() {
  Host host(2, 8 * sizeof(Counter));
  int mailbox = 0;
  SignalArray arrays[2] = {{host.meshes[0], host.data[0], 0, nullptr},
                           {host.meshes[1], host.data[1], 100, nullptr}};
  auto never = [] { return false; };
  auto wait = [&](int rank, Selection at, Compare compare, uint64_t value) {
    return arrays[rank].wait(at, compare, value, 20'000'000'000, never).status;
  };
  constexpr uint64_t rounds = 3000;
  std::thread consumer([&] {
    for (uint64_t i = 1; i <= rounds; ++i) {
      CHECK(wait(1, {2, 3, 1}, Compare::greater_equal, i) == WaitStatus::none);
      CHECK(mailbox == static_cast<int>(i));
      CHECK(arrays[1].set(0, {1, 1, 1}, i));
    }
  });
  for (uint64_t i = 1; i <= rounds; ++i) {
    mailbox = static_cast<int>(i);
    CHECK(arrays[0].add(1, {2, 3, 1}, 1));
    CHECK(wait(0, {1, 1, 1}, Compare::equal, i) == WaitStatus::none);
  }
  consumer.join();
  CHECK(arrays[1].values({0, 4, 2}) == (std::vector<uint64_t>{0, rounds, rounds, 0}));
  CHECK(arrays[1].test({2, 3, 1}, Compare::less_equal, rounds) &&
        !arrays[1].test({2, 4, 1}, Compare::greater, 0));
  auto late = arrays[1].wait({2, 4, 1}, Compare::greater, 0, 1'000'000, never);
  CHECK(late.status == WaitStatus::timeout && late.index == 5 && late.actual == 0);
  std::thread leaver([&] { host.meshes[0]->leave(false); });
  CHECK(wait(1, {7, 1, 1}, Compare::equal, 1) == WaitStatus::left);
  leaver.join();
  host.meshes[0]->abort({"KeyError", 0, "gone"});
  while (!host.meshes[1]->failed()) weft::pause();
  CHECK(wait(1, {7, 1, 1}, Compare::equal, 1) == WaitStatus::failed &&
        !arrays[1].add(0, {0, 1, 1}, 1));
}

// The kind of stores is selected by the measured times of both, and again when the times change.
void test_adaptive_stores() {
  AdaptiveStores stores;
  // number of copies with non-temporal stores, if each kind takes this time per byte
  auto streamed = [&](float temporal, float non_temporal, int copies) {
    int found = 0;
    for (int copy = 0; copy < copies; ++copy) {
      stores.begin(size_t{64} << 10);
      found += stores.non_temporal();
      // the first copy has page faults
      stores.record((stores.non_temporal() ? non_temporal : temporal) * (copy ? 1 : 20));
    }
    return found;
  };
  CHECK(streamed(0.05f, 0.05f, 3000) < 60);    // threads of one core
  CHECK(streamed(0.6f, 0.05f, 3000) > 2700);   // distant cores from now on
  CHECK(streamed(0.05f, 0.08f, 3000) < 1100);  // near cores: found at the next trial
  CHECK(streamed(0.06f, 0.04f, 3000) < 60);    // the peer would lose more than this rank gains
}

// Every kind of stores gives the same bytes.
void test_kinds_of_stores() {
  for (Stores kind : {Stores::cached, Stores::streaming, Stores::adaptive}) {
    CHECK(stores_named(name_of(kind)) == kind);
    set_stores(kind);
    test_copies();
    test_several_targets();
    test_sums();
    test_eager(2, 50);
  }
  bool refused = false;
  try {
    stores_named("fast");
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused && stores() == Stores::adaptive);
}

// A thread that waits for a call begins it; the progress thread begins calls for which no thread
// waits, also if it sleeps by then.
void test_deferred_work() {
  DeferredWork work;
  std::mutex mutex;
  int left = 0;
  auto take = [&] {
    std::lock_guard lock(mutex);
    for (; left; --left) work.begin();
  };
  auto issue = [&] {
    std::lock_guard lock(mutex);
    ++left;
    work.issue();
  };
  auto all_begun = [&] {
    std::lock_guard lock(mutex);
    return !left;
  };
  std::thread progress([&] {
    while (work.due()) take();
  });
  for (int round = 0; round < 30; ++round) {
    for (int i = 0; i < 1000; ++i) issue(), take();
    if (round % 3 == 0) usleep(5000);  // the progress thread sleeps without a limit by then
    issue();
    if (round % 2) work.hurry();
    while (!all_begun()) std::this_thread::yield();
  }
  work.begin();  // a call may end before its issue is counted
  work.issue();
  work.close();
  progress.join();
}

int main() {
  test_deferred_work();
  test_adaptive_stores();
  test_copies();
  test_several_targets();
  test_transposing();
  test_sums();
  test_wrapping_sums<int8_t>(Dtype::int8);
  test_wrapping_sums<int16_t>(Dtype::int16);
  test_wrapping_sums<int32_t>(Dtype::int32);
  test_wrapping_sums<int64_t>(Dtype::int64);
  test_conversions();
  test_half_products<Float16>(Dtype::float16);
  test_half_products<BFloat16>(Dtype::bfloat16);
  test_experts<Float16>(Dtype::float16);
  test_experts<BFloat16>(Dtype::bfloat16);
  test_experts<float>(Dtype::float32);
  test_teams();
  test_lanes(2, 300);
  test_lanes(4, 200);
  test_eager(2, 500);
  test_eager(4, 500);
  test_network(2, 300, 2);
  test_network(3, 20, 300'000);
  test_messages(3, false, false);
  if (memory_can_be_read()) test_messages(3, false, true);
  test_messages(3, true, false);
  test_regions();
  test_kinds_of_stores();
  test_rows_that_wait_for_a_rank_of_this_host();
  test_an_end_behind_a_message();
  test_a_long_announcement();
  test_an_end_behind_rows_that_wait();
  test_an_abort_in_the_middle_of_a_message();
  test_rows_that_wait_when_a_world_is_aborted();
  test_a_wait_ends_early();
  test_events();
  test_lanes_end_together();
  test_increments_before_leaving_count();
  test_strided_copies();
  test_copies_in_tiles();
  test_transfers();
  test_allocation_under_a_timer();
  test_signal_arrays();
  std::puts("native core: all checks passed");
}
