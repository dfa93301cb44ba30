//! Gives the shared library its name and, with the feature `header`, writes the C header to OUT_DIR. Run by cargo.
//!
//! The committed header is `include/railhead.h`; a test compares the two, `make header` copies this one.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // NCCL unloads plugins while threads may still be in them, so the code stays mapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,librailhead.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    #[cfg(feature = "header")]
    header::write();
}

#[cfg(feature = "header")]
mod header {
    use std::path::PathBuf;
    use std::{env, fs};

    pub fn write() {
        println!("cargo:rerun-if-changed=cbindgen.toml");
        println!("cargo:rerun-if-changed=src/abi");
        let header = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("railhead.h");
        let config = cbindgen::Config::from_file("cbindgen.toml").expect("cbindgen.toml is read");
        let mut builder = cbindgen::Builder::new().with_config(config).with_after_include(macros());
        for source in boundary() {
            builder = builder.with_src(source);
        }
        match builder.generate() {
            Ok(bindings) => {
                bindings.write_to_file(&header);
            }
            // The compiler says it better; and nobody must take an old header for a new one.
            Err(error) => {
                println!("cargo:warning=no C header: {error}");
                let _ = fs::remove_file(&header);
            }
        }
    }

    /// The files of the C boundary with functions for C programs. Not `nccl`: its tables are data, with types of NCCL's. One by one, because
    /// looking for modules would need `cargo metadata`, and with it the network.
    fn boundary() -> Vec<PathBuf> {
        // No such directory: nothing is exported.
        let entries = fs::read_dir("src/abi").into_iter().flatten().flatten();
        let exports = |path: &PathBuf| fs::read_to_string(path).is_ok_and(|text| text.contains("no_mangle"));
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(exports).collect();
        // The order of the header must not depend on the file system's.
        files.sort();
        files
    }

    fn macros() -> String {
        let part = |name: &str| env::var(format!("CARGO_PKG_VERSION_{name}")).unwrap_or_default();
        format!(
            "\n/* Version of this header; railhead_version() tells that of the loaded library. */\n\
             #define RAILHEAD_VERSION_MAJOR {}\n#define RAILHEAD_VERSION_MINOR {}\n#define RAILHEAD_VERSION_PATCH {}\n\n\
             /* As a number of bytes of a buffer: all there are from the offset on. */\n#define RAILHEAD_REST SIZE_MAX\n\n\
             /* Bytes of the longest address of a rank's end of a pair. */\n#define RAILHEAD_MESH_ADDRESS 16384",
            part("MAJOR"),
            part("MINOR"),
            part("PATCH")
        )
    }
}
