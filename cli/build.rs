//! Compiles the logger that plugins are given: it is variadic, which only C can define. Run by cargo.

fn main() {
    println!("cargo:rerun-if-changed=src/plugin/logger.c");
    cc::Build::new().file("src/plugin/logger.c").std("c11").warnings(true).warnings_into_errors(true).compile("plugin_logger");
}
