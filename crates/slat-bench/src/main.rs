//! The `slat-bench` command. The library has all of its code, so that tests can reach it.

fn main() -> std::process::ExitCode {
    slat_bench::main()
}
