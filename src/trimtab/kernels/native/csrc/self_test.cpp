// Checks a kernel against plain C++ in double precision before it may serve: on a CPU where it was never run, a kernel
// that is silently wrong would be the worst fault. Takes about a millisecond per kernel.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "core.hpp"

namespace trimtab {
namespace {

// The same numbers on every machine and run.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 33);
  }
  // In [-1, 1), with at most 7 significant bits: exact as bf16.
  float bf16() { return (static_cast<int>(bits() % 256) - 128) / 128.0f; }

 private:
  uint64_t state_;
};

uint16_t upper_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// A weight matrix in double precision and in the format under test.
struct TestMatrix {
  int64_t columns;
  int64_t depth;
  std::vector<double> values;
  std::vector<char> stored;
  std::vector<float> bias;
  std::vector<float> scale;

  ConstMatrix view() const { return {stored.data(), bias.data(), scale.data()}; }

  TestMatrix(WeightFormat format, int64_t n, int64_t k, Numbers& numbers) : columns(n), depth(k) {
    values.resize(n * k);
    bias.resize(n);
    scale.resize(n);
    for (float& b : bias) b = numbers.bf16();
    for (float& s : scale) s = (1 + numbers.bits() % 8) / 512.0f;
    for (int64_t i = 0; i < n * k; ++i) {
      if (format == WeightFormat::int8) {
        // The ends of the range matter most: they are what saturating instructions get wrong.
        const int q = numbers.bits() % 4 ? static_cast<int>(numbers.bits() % 255) - 127 : (numbers.bits() % 2 ? 127 : -127);
        stored.push_back(static_cast<char>(q));
        values[i] = static_cast<double>(q) * scale[i / k];
        continue;
      }
      const float value = numbers.bf16();
      values[i] = value;
      const uint16_t half = upper_half(value);
      const char* bytes = format == WeightFormat::bf16 ? reinterpret_cast<const char*>(&half)
                                                       : reinterpret_cast<const char*>(&value);
      stored.insert(stored.end(), bytes, bytes + (format == WeightFormat::bf16 ? 2 : 4));
    }
  }
};

// A value, and how far a correct kernel may be from it.
struct Bounded {
  double value;
  double error;
};

// The Hadamard transform of each whole piece of 32 values, in the order of rows.hpp's, and four times what is left.
std::vector<double> rotated(std::vector<double> row) {
  for (size_t first = 0; first + 32 <= row.size(); first += 32)
    for (size_t distance = 16; distance; distance /= 2)
      for (size_t i = first; i < first + 32; ++i) {
        if ((i - first) & distance) continue;
        const float a = static_cast<float>(row[i]), b = static_cast<float>(row[i + distance]);
        row[i] = a + b;
        row[i + distance] = a - b;
      }
  for (size_t i = row.size() / 32 * 32; i < row.size(); ++i) row[i] *= 4;
  return row;
}

// What a kernel sees of a row: int8 kernels see it quantised, experts' ones in the rotated form of their weights.
std::vector<double> as_seen(const KernelTable& kernels, std::vector<double> row, bool is_rotated) {
  if (kernels.format != WeightFormat::int8) return row;
  if (is_rotated) row = rotated(std::move(row));
  float largest = 0.0f;
  for (const double value : row) largest = std::max(largest, std::fabs(static_cast<float>(value)));
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  std::vector<double> seen;
  for (const double value : row) seen.push_back(std::nearbyint(static_cast<float>(value) * inverse) * (largest / 127.0f));
  return seen;
}

// `relative` is the relative error of the row's values.
Bounded dot(const TestMatrix& matrix, int64_t column, const std::vector<double>& row, double relative) {
  double sum = matrix.bias[column];
  double magnitude = std::fabs(sum);
  for (int64_t k = 0; k < matrix.depth; ++k) {
    const double product = row[k] * matrix.values[column * matrix.depth + k];
    sum += product;
    magnitude += std::fabs(product);
  }
  return {sum, magnitude * (relative + matrix.depth * 1.2e-7) + 1e-6};
}

double reference_activation(const Activation& activation, double x) {
  switch (activation.kind) {
    case ActivationKind::silu: return x / (1 + std::exp(-x));
    case ActivationKind::gelu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case ActivationKind::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case ActivationKind::relu: return std::max(0.0, x);
    case ActivationKind::relu2: return std::max(0.0, x) * std::max(0.0, x);
    case ActivationKind::swiglu_clamped: return x / (1 + std::exp(-activation.alpha * x));
  }
  return 0;
}

double reference_inner(const Activation& activation, bool has_gate, double gate, double up) {
  if (activation.kind == ActivationKind::swiglu_clamped) {
    const double limit = activation.limit;
    return reference_activation(activation, std::min(gate, limit)) * (std::min(std::max(up, -limit), limit) + 1);
  }
  return reference_activation(activation, gate) * (has_gate ? up : 1.0);
}

class Failure {
 public:
  std::string text;
  void check(const char* what, int64_t row, int64_t column, float got, const Bounded& want) {
    if (!text.empty() || std::fabs(got - want.value) <= want.error) return;  // a NaN fails the comparison
    char message[200];
    std::snprintf(message, sizeof message, "%s: row %lld column %lld is %.9g, expected %.9g +- %.2g", what,
                  static_cast<long long>(row), static_cast<long long>(column), static_cast<double>(got), want.value,
                  want.error);
    text = message;
  }
};

void check_linear(const KernelTable& kernels, int64_t columns, int64_t depth, int64_t num_rows, Failure& failure) {
  Numbers numbers(columns * 1000 + depth);
  const TestMatrix matrix(kernels.format, columns, depth, numbers);
  int64_t bytes = 0;
  const MatrixLayout layout = linear_layout(kernels.format, columns, depth, &bytes);
  std::vector<char> packed(bytes);
  pack_linear(layout, matrix.view(), packed.data());
  std::vector<float> input(num_rows * depth);
  for (float& value : input) value = numbers.bf16();
  std::vector<float> out(num_rows * columns, NAN);
  run_linear(kernels, layout, packed.data(), {input.data(), Scalar::fp32, depth}, {out.data(), Scalar::fp32, columns},
             num_rows, 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    const std::vector<double> seen =
        as_seen(kernels, std::vector<double>(input.begin() + row * depth, input.begin() + (row + 1) * depth), false);
    for (int64_t column = 0; column < columns; ++column)
      failure.check("linear", row, column, out[row * columns + column], dot(matrix, column, seen, 0.0));
  }
}

struct TestExpert {
  TestMatrix gate_up;
  TestMatrix down;
  std::vector<char> slot;
};

void check_moe(const KernelTable& kernels, const Activation& activation, bool has_gate, Failure& failure) {
  const int64_t hidden = 37, inter = 41, num_slots = 4, num_tokens = 13, top_k = 2;
  Numbers numbers(static_cast<uint64_t>(activation.kind) * 2 + has_gate + 1);
  const SlotLayout layout = slot_layout(kernels.format, hidden, inter, has_gate);
  std::vector<TestExpert> experts;
  std::vector<const void*> table;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    experts.push_back({TestMatrix(kernels.format, layout.gate_up.columns, hidden, numbers),
                       TestMatrix(kernels.format, hidden, inter, numbers), std::vector<char>(layout.bytes)});
    pack_slot(layout, experts.back().gate_up.view(), experts.back().down.view(), experts.back().slot.data());
  }
  for (const TestExpert& expert : experts) table.push_back(expert.slot.data());
  std::vector<float> input(num_tokens * hidden);
  for (float& value : input) value = numbers.bf16();
  std::vector<int64_t> ids(num_tokens * top_k);
  std::vector<float> gates(num_tokens * top_k);
  for (int64_t pair = 0; pair < num_tokens * top_k; ++pair) {
    // Slot 0 stays empty, slot 1 takes many rows, some pairs are padding.
    const int64_t draw = numbers.bits() % 8;
    ids[pair] = draw == 0 ? -1 : draw <= 5 ? 1 : draw - 4;
    gates[pair] = numbers.bf16();
  }
  std::vector<float> out(num_tokens * hidden, NAN);
  const MoeCall call{layout,     activation,   table.data(), num_slots, {input.data(), Scalar::fp32, hidden},
                     {out.data(), Scalar::fp32, hidden},      ids.data(), gates.data(), num_tokens, top_k, 1};
  if (run_moe(kernels, call) != Status::ok) {
    failure.text = "the layer did not run";
    return;
  }
  // Inner values: rounded to bf16 where the kernel does that; for int8 a value near the middle of two integers may
  // round either way (1/127 of the row's largest, against sums of many such values).
  const double inner_error = kernels.format == WeightFormat::int8 ? 2e-2 : kernels.rounds_rows_to_bf16 ? 4e-3 : 4e-6;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const std::vector<double> row = as_seen(
        kernels, std::vector<double>(input.begin() + token * hidden, input.begin() + (token + 1) * hidden), true);
    std::vector<Bounded> sums(hidden, {0.0, 1e-6});
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
      if (ids[pair] < 0) continue;
      const TestExpert& expert = experts[ids[pair]];
      std::vector<double> inner(inter);
      for (int64_t i = 0; i < inter; ++i) {
        const double gate = dot(expert.gate_up, i, row, 0).value;
        const double up = has_gate ? dot(expert.gate_up, inter + i, row, 0).value : 1.0;
        inner[i] = reference_inner(activation, has_gate, gate, up);
      }
      inner = as_seen(kernels, inner, true);
      for (int64_t h = 0; h < hidden; ++h) {
        const Bounded part = dot(expert.down, h, inner, inner_error);
        sums[h].value += gates[pair] * part.value;
        sums[h].error += std::fabs(gates[pair]) * part.error;
      }
    }
    for (int64_t h = 0; h < hidden; ++h) failure.check("moe", token, h, out[token * hidden + h], sums[h]);
  }
}

}  // namespace

std::string self_test(const KernelTable& kernels) {
  Failure failure;
  // Depths around one step, one piece and one block; every tile height, alone and in balanced groups, and many rows.
  const int64_t shapes[][3] = {{1, 1, 1}, {65, 3, 2}, {64, 33, 3}, {70, 131, 4}, {33, 300, 5}, {129, 97, 6}, {66, 40, 7}, {31, 64, 13}, {67, 275, 29}};
  for (const auto& shape : shapes) check_linear(kernels, shape[0], shape[1], shape[2], failure);
  const ActivationKind kinds[] = {ActivationKind::silu, ActivationKind::gelu,  ActivationKind::gelu_tanh,
                                  ActivationKind::relu, ActivationKind::relu2, ActivationKind::swiglu_clamped};
  for (const ActivationKind kind : kinds) {
    check_moe(kernels, {kind, 1.702f, 2.0f}, true, failure);
    if (kind != ActivationKind::swiglu_clamped) check_moe(kernels, {kind, 0.0f, 0.0f}, false, failure);
  }
  return failure.text;
}

}  // namespace trimtab
