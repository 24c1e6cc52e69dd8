// The source filter (cpu/filter.cpp) on snippets of CUDA source made to deceive it.
//
// Runs the program named by the environment variable GPT_FILTER, else build/cpu/filter. The last test cases
// compile what it wrote with g++, run it, and ask the compiler and gdb for line numbers.
#include <doctest/doctest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "test/skip.h"

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// A folder of its own for each test case, removed at its end.
class Workspace {
 public:
  Workspace() {
    std::string pattern = (fs::temp_directory_path() / "test_filter_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot create " + pattern);
    folder = pattern;
  }
  ~Workspace() { fs::remove_all(folder); }

  // Exit code of a shell command run in the folder; `messages` becomes what it printed.
  int run(const std::string& command) {
    const fs::path log = folder / "log";
    const int status = std::system(("cd " + folder.string() + " && (" + command + ") > log 2>&1").c_str());
    messages = read_file(log);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  int filter(const std::string& arguments) {
    const char* given = std::getenv("GPT_FILTER");
    return run(fs::absolute(given ? given : "build/cpu/filter").string() + " " + arguments);
  }

  fs::path folder;
  std::string messages;
};

// What the filter makes of a source, without its first line, which is checked here like the number of lines.
std::string filtered(const std::string& source) {
  Workspace work;
  write_file(work.folder / "in.cu", source);
  const int code = work.filter("in.cu out.cpp");
  INFO(source);
  INFO(work.messages);
  REQUIRE(code == 0);
  const std::string output = read_file(work.folder / "out.cpp"), first = "#line 1 \"in.cu\"\n";
  REQUIRE(output.starts_with(first));
  const auto lines = [](const std::string& text) { return std::count(text.begin(), text.end(), '\n'); };
  CHECK(lines(output) == lines(source) + 1);
  return output.substr(first.size());
}

// The message with which a source is refused; no output may be left behind, not even an older one.
std::string refused(const std::string& source) {
  Workspace work;
  write_file(work.folder / "in.cu", source);
  write_file(work.folder / "out.cpp", "from an earlier run");
  const int code = work.filter("in.cu out.cpp");
  INFO(source);
  CHECK(code == 1);
  CHECK(!fs::exists(work.folder / "out.cpp"));
  CHECK(std::count(work.messages.begin(), work.messages.end(), '\n') == 1);
  CHECK(work.messages.find("supported") != std::string::npos);
  return work.messages.substr(0, work.messages.find(", supported"));
}

// A launch of `call`, the kernel with its template arguments, as the filter writes it.
std::string launch(const std::string& name, const std::string& call, const std::string& configuration) {
  return "::cpu::launcher(\"" + name + "\", CPU_KERNEL(" + call + "), " + configuration + ")";
}

void check_unchanged(const std::string& source) { CHECK(filtered(source) == source); }

TEST_CASE("launches become calls of the launcher") {
  CHECK(filtered("k<<<1, 32>>>(x);") == launch("k", "k", "1, 32") + "(x);");
  CHECK(filtered("k <<< 1, 32 >>> (x);") == launch("k", "k ", " 1, 32 ") + " (x);");
  CHECK(filtered("k<<<g, b, 4 * sizeof(T), s>>>();") == launch("k", "k", "g, b, 4 * sizeof(T), s") + "();");
  CHECK(filtered("k<float, 4><<<1, 2>>>();") == launch("k", "k<float, 4>", "1, 2") + "();");
  CHECK(filtered("a::b<int><<<1, 2>>>();") == launch("a::b", "a::b<int>", "1, 2") + "();");
  CHECK(filtered("::a::b<<<1, 2>>>();") == launch("::a::b", "::a::b", "1, 2") + "();");
  CHECK(filtered("t<int>::f<<<1, 2>>>();") == launch("t::f", "t<int>::f", "1, 2") + "();");
}

TEST_CASE("template arguments may hold brackets, shifts and comparisons in parentheses") {
  for (const std::string call :
       {"k<A<B<int>>, 3>", "k<(sizeof(x) > 4)>", "k<(a < b), (1 >> 2)>", "k<1 << 3>", "k<f(a, b)>",
        "k<A<int>>", "k<decltype(p->x)>", "k<T, N / (X > 1 ? X : 1)>", "k<x[1 > 0]>", "k<A<B<C<int>>>>"}) {
    CHECK(filtered(call + "<<<1, 2>>>(x);") == launch("k", call, "1, 2") + "(x);");
  }
}

TEST_CASE("configurations may hold templates, shifts, comparisons, lambdas, comments and strings") {
  for (const std::string configuration :
       {"dim3(1, 2, 3), 4", "n >> 2, 1 << 5", "n < 3 ? 1 : 2, 32", "n > m, 32", "f<a, b>(1), g<int>(2), 0, s",
        "f<A<B<int>>>(n), 32", "1, v<int>", "sizeof(A<B<C<int>>>), 1", "[&] { return a, b; }(), 1",
        "p->x, q[i > 1]", "1, \">>>\"[0]", "1, '>'", "1 /* >>> */, 2", "1, // >>>(\n 2",
        "ceil_div(n, 256), 256, 0, stream[i]"}) {
    CHECK(filtered("k<<<" + configuration + ">>>(x);") == launch("k", "k", configuration) + "(x);");
  }
}

TEST_CASE("line breaks and comments stay where they are") {
  const std::string kernel = "k<float,  // type\n  8>\n  /* <<< */ ";
  const std::string configuration = "grid, // blocks\n 256\n";
  const std::string arguments = "\n(x,\n y);\nnext();\n";
  CHECK(filtered(kernel + "<<<" + configuration + ">>>" + arguments) ==
        launch("k", kernel, configuration) + arguments);
}

TEST_CASE("launches are found wherever a statement may stand") {
  const std::string k = launch("k", "k", "1, 2") + "()";
  CHECK(filtered("if (a < b) k<<<1, 2>>>(); else k<<<1, 2>>>();") == "if (a < b) " + k + "; else " + k + ";");
  CHECK(filtered("do k<<<1, 2>>>(); while (0);") == "do " + k + "; while (0);");
  CHECK(filtered("return k<<<1, 2>>>();") == "return " + k + ";");
  CHECK(filtered("return ::k<<<1, 2>>>();") == "return " + launch("::k", "::k", "1, 2") + "();");
  CHECK(filtered("{k<<<1, 2>>>();} label: k<<<1, 2>>>();") == "{" + k + ";} label: " + k + ";");
  CHECK(filtered("a ? k<<<1, 2>>>() : k<<<1, 2>>>();") == "a ? " + k + " : " + k + ";");
  CHECK(filtered("CHECK(k<<<1, 2>>>(), k<<<1, 2>>>());") == "CHECK(" + k + ", " + k + ");");
  CHECK(filtered("#if A < B\nk<<<1, 2>>>();\n#endif\n") == "#if A < B\n" + k + ";\n#endif\n");
  CHECK(filtered("k<<<[&] { k<<<1, 2>>>(); return 1; }(), 3>>>();") ==
        launch("k", "k", "[&] { " + k + "; return 1; }(), 3") + "();");
}

TEST_CASE("launches in macros keep the line continuations") {
  CHECK(filtered("#define RUN(k, n) \\\n  k<T><<<(n) / 32, \\\n    32>>>(n)\nint x;\n") ==
        "#define RUN(k, n) \\\n  " + launch("k", "k<T>", "(n) / 32, \\\n    32") + "(n)\nint x;\n");
  CHECK(filtered("#define RUN k<<<1, 2>>>()\n") == "#define RUN " + launch("k", "k", "1, 2") + "()\n");
  CHECK(filtered("#define RUN ::k<<<1, 2>>>()\n") == "#define RUN " + launch("::k", "::k", "1, 2") + "()\n");
}

TEST_CASE("a kernel's static is dropped, a function's stays") {
  CHECK(filtered("static\n__global__ void k();\nstatic __device__ int f();") == "\n__global__ void k();\nstatic __device__ int f();");
}

TEST_CASE("everything else is left alone") {
  check_unchanged("");
  check_unchanged("int x = a << 2 >> b; bool y = a < b << c; std::cout << x << \"<<<\" << y;");
  check_unchanged("A<B<C<int>>> z; x <<= 2; x >>= 3; auto o = a <=> b;");
  check_unchanged("// k<<<1, 2>>>() \\\n   and k<<< on the next line\n/* k<<<\n */ int x; // don't \"stop\n");
  check_unchanged("\"k<<<\"; \"\\\"<<<\"; '<'; '\\''; '\"'; L\"<<<\"; \"a\\\nb<<<\"; u8'<';");
  check_unchanged("R\"(k<<<)\"; R\"x(<<< )\" )x\"; u8R\"(\n<<<\n\")\";");
  check_unchanged("int n = 1'000'000; float f = 1'0.5e-3f; int h = 0xA'B;");
  check_unchanged("#include <a/b.h>\n#  error don't use <<<\n#warning it's <<< \\\n isn't\n#pragma unroll\n");
  check_unchanged("extern int x; extern \"C\" void f(); extern template class A<int>; extern \"C\" {}");
  check_unchanged("__shared__ float x[32]; int \xc3\xa9t\xc3\xa9;\r\nint no_newline_at_the_end;");
}

TEST_CASE("dynamic shared memory becomes a pointer") {
  const auto in_kernel = [](const std::string& line) { return "void k() {" + line + "\n}\n"; };
  const auto words = [&](const std::string& line) {  // blanks that the removed words leave do not matter
    std::string text = filtered(in_kernel(line));
    text = text.substr(10, text.size() - 13);
    return text.substr(text.find_first_not_of(' '));
  };
  CHECK(words("extern __shared__ float x[];") == "float* x = ::cpu::dynamic_shared<float>();");
  CHECK(words("extern __shared__ __align__(16) char x[];") == "char* x = ::cpu::dynamic_shared<char>();");
  CHECK(words("extern __align__(16) __shared__ T x[];") == "T* x = ::cpu::dynamic_shared<T>();");
  CHECK(words("extern __shared__ alignas(sizeof(A<B>)) T x[\n];") == "T* x = ::cpu::dynamic_shared<T>()\n;");
  CHECK(words("extern __shared__ unsigned char x[];") ==
        "unsigned char* x = ::cpu::dynamic_shared<unsigned char>();");
  CHECK(words("extern __shared__ std::pair<int, T> x[];") ==
        "std::pair<int, T>* x = ::cpu::dynamic_shared<std :: pair < int , T >>();");
  CHECK(words("extern float __shared__ x[]; // x[]") == "float*  x = ::cpu::dynamic_shared<float>(); // x[]");
  CHECK(words("extern __shared__\n  // size: <<<\n  float\n x[];") ==
        "\n  // size: <<<\n  float*\n x = ::cpu::dynamic_shared<float>();");
  const std::string method = "struct F { void f() const noexcept { extern __shared__ int x[]; } };";
  CHECK(filtered(method).find("int* x = ") != std::string::npos);
}

TEST_CASE("launches that are not understood are refused") {
  CHECK(refused("\n\n(*f)<<<1, 2>>>();") == "in.cu:3: '<<<' after ')'");
  CHECK(refused("'a' \"b\\\nc\" <<<1, 2>>>();") == "in.cu:2: '<<<' after a literal");
  CHECK(refused("f[0]<<<1, 2>>>();") == "in.cu:1: '<<<' after ']'");
  CHECK(refused("<<<1, 2>>>();") == "in.cu:1: '<<<' after the edge of the file or of a preprocessor line");
  CHECK(refused("a >\n<<<1, 2>>>();") == "in.cu:2: '>' that closes no template arguments before '<<<'");
  CHECK(refused("a)><<<1, 2>>>();") == "in.cu:1: ')' without its counterpart");
  CHECK(refused("object.f<<<1, 2>>>();") == "in.cu:1: '.' before a kernel's name");
  CHECK(refused("this->f<<<1, 2>>>();") == "in.cu:1: '->' before a kernel's name");
  CHECK(refused("t<T>::template f<int><<<1, 2>>>();") == "in.cu:1: 'template' before a kernel's name");
  CHECK(refused("a :: b<<<1, 2>>>();") == "in.cu:1: 'a' before a kernel's name");
  CHECK(refused("k<a < b><<<1, 2>>>();") == "in.cu:1: '<' before a kernel's name");
  CHECK(refused("k<T, a < b><<<1, 2>>>();") == "in.cu:1: comparison with '<' that is not in parentheses");
  CHECK(refused("int x;\nk<<<1,\n 2;\n") == "in.cu:2: '<<<' without '>>>' before ';'");
  CHECK(refused("k<<<1, 2>>(x);") == "in.cu:1: '<<<' without '>>>' before ';'");
  CHECK(refused("k<<<(1, 2>>>();") == "in.cu:1: '(' without its counterpart");
  CHECK(refused("f(k<<<1, 2);") == "in.cu:1: '<<<' without '>>>' before ')'");
  CHECK(refused("k<<<1,\n#if X\n2>>>();") ==
        "in.cu:1: '<<<' without '>>>' before the edge of the file or of a preprocessor line");
  CHECK(refused("#define RUN k<<<1,\n2>>>();") ==
        "in.cu:1: '<<<' without '>>>' before the edge of the file or of a preprocessor line");
  CHECK(refused("k<<<1,\n2>>>;") == "in.cu:2: ';' after '>>>'");
  CHECK(refused("k<<<>>>();") == "in.cu:1: 0 expressions in '<<<...>>>'");
  CHECK(refused("k<<<1, 2, 3, 4, f(5)>>>();") == "in.cu:1: 5 expressions in '<<<...>>>'");
}

TEST_CASE("shared memory that is not understood is refused") {
  const std::string other = ": 'extern __shared__' of anything but one unsized array";
  for (const std::string declaration :
       {"float x[4]", "float x", "float x[][4]", "float x[], y[]", "float x, y[]", "x[]", "float x[] = {}",
        "float (*x)[]", "float f(int)"}) {
    CHECK(refused("\nvoid k() {\n  extern __shared__ " + declaration + ";\n}") == "in.cu:3" + other);
  }
  CHECK(refused("void k() { extern __shared__ float x[]") == "in.cu:1" + other);
  const std::string outside = "in.cu:2: 'extern __shared__' outside a function";
  CHECK(refused("namespace n {\nextern __shared__ float x[];\n}") == outside);
  CHECK(refused("void k() {}\nextern __shared__ int x[];") == outside);
}

TEST_CASE("what never ends is refused at the line where it begins") {
  CHECK(refused("\nint x; /* comment\n\n") == "in.cu:2: comment that never ends");
  CHECK(refused("\nauto s = R\"x(text)\"\n;") == "in.cu:2: raw string that never ends");
  CHECK(refused("\n\"text\n\"") == "in.cu:2: literal that never ends");
  CHECK(refused("'a") == "in.cu:1: literal that never ends");
  CHECK(refused("\"a\\") == "in.cu:1: literal that never ends");
}

TEST_CASE("a name with quotes, and files that cannot be used") {
  Workspace work;
  write_file(work.folder / "in.cu", "int x;\n");
  write_file(work.folder / "a\"b.cu", "int y;\n");
  CHECK(work.filter("'a\"b.cu' out.cpp") == 0);
  CHECK(read_file(work.folder / "out.cpp") == "#line 1 \"a\\\"b.cu\"\nint y;\n");
  CHECK(work.filter("in.cu") == 2);
  CHECK(work.filter("in.cu in.cu") == 2);
  CHECK(read_file(work.folder / "in.cu") == "int x;\n");
  CHECK(work.filter("missing.cu out.cpp") == 1);
  CHECK(work.messages == "missing.cu: cannot be read, give a readable file\n");
  CHECK(work.filter("in.cu missing/out.cpp") == 1);
  CHECK(work.messages == "missing/out.cpp: cannot be written, check folder, permissions and free space\n");
}

// A launcher that runs the blocks' threads in a loop, and a source that launches over several lines.
const std::string stand_in = R"(#pragma once
#include <cstdio>
inline int thread;
#define CPU_KERNEL(...) [=](auto... arguments) { __VA_ARGS__(arguments...); }
namespace cpu {
template <class Body>
auto launcher(const char* name, Body body, int grid, int block) {
  return [=](auto... arguments) {
    for (thread = 0; thread < grid * block; ++thread) body(arguments...);
    std::printf("%s done\n", name);
  };
}
}
)";

const std::string program = R"(#include "stand_in.h"
template <class T, int N>
void add(T* sum, T value) {
  *sum += N * value;  // line 4
}
int main() {
  int sum = 0;
  add<int,
      (3 > 2 ? 2 : 1)>  // twice
      <<<4,
         8>>>(&sum,
              1);
  std::printf("sum %d\n", sum);
}
)";

TEST_CASE("a filtered program runs, and messages and breakpoints name the original line") {
  Workspace work;
  write_file(work.folder / "stand_in.h", stand_in);
  fs::create_directory(work.folder / "source");
  write_file(work.folder / "source/add.cu", program);
  REQUIRE(work.filter("source/add.cu out.cpp") == 0);
  REQUIRE(work.run("g++ -std=c++20 -g -O0 -Wall -Wextra -Werror out.cpp -o add") == 0);
  CHECK(work.run("./add") == 0);
  CHECK(work.messages == "add done\nsum 64\n");

  SUBCASE("compiler") {
    std::string wrong = program;
    wrong.replace(wrong.find("              1);"), 17, "              one);");  // line 12
    write_file(work.folder / "source/add.cu", wrong);
    REQUIRE(work.filter("source/add.cu out.cpp") == 0);
    CHECK(work.run("g++ -std=c++20 -c out.cpp -o out.o") != 0);
    CHECK(work.messages.find("source/add.cu:12:15: error: ") != std::string::npos);
  }
  SUBCASE("debugger") {
    if (work.run("command -v gdb") != 0) return skip("gdb is not installed: the compiler's messages were tested, breakpoints not");
    CHECK(work.run("gdb -nx -batch -ex 'break source/add.cu:4 if thread == 31' -ex run -ex 'print thread' "
                   "-ex 'print *sum' -ex backtrace ./add") == 0);
    INFO(work.messages);
    CHECK(work.messages.find("at source/add.cu:4\n") != std::string::npos);  // where it stopped
    CHECK(work.messages.find("$1 = 31\n$2 = 62\n") != std::string::npos);
    CHECK(work.messages.find("in main () at source/add.cu:1") != std::string::npos);
  }
}
