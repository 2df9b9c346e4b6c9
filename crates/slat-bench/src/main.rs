//! The `slat-bench` command. All of it is in the library, where tests can reach it.

fn main() -> std::process::ExitCode {
    slat_bench::main()
}
