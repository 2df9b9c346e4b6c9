//! `include/slat.h` is what cbindgen makes of the crate.

use std::path::Path;

#[test]
fn the_header_is_that_of_the_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let sources = ["abi", "arm64", "handle", "log", "space"];
    let builder = sources.iter().fold(cbindgen::Builder::new(), |builder, name| {
        builder.with_src(root.join("src").join(name).with_extension("rs"))
    });
    let mut made = Vec::new();
    builder.with_config(config).generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = root.join("include/slat.h");
    if std::env::var_os("SLAT_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(kept == made, "run SLAT_WRITE_HEADER=1 cargo test --package slat-capi --test header");
}
