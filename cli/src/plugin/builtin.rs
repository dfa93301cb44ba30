//! The network plugins inside NCCL's own library: `nccl:FILE` names its Socket, `nccl-ib:FILE` its net_ib. Used where a plugin is loaded.
//!
//! NCCL does not export their tables, so they are found by the file's symbol table, which NVIDIA's packages keep.

use std::ffi::{CStr, CString, c_int, c_void};
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use memmap2::Mmap;
use object::{Object, ObjectSymbol};

use super::{Plugin, VERSIONS};

/// A function that NCCL exports: the distance between its address and its symbol's value is that of every other symbol.
const EXPORTED: &str = "ncclGetVersion";

/// One of NCCL's own plugins.
struct Kind {
    /// What stands before the file's name.
    prefix: &'static str,
    /// The table's symbol, and part of the mangled name of its getProperties.
    table: &'static str,
    properties: &'static str,
}

const KINDS: [Kind; 2] = [
    Kind { prefix: "nccl:", table: "ncclNetSocket", properties: "ncclNetSocketGetProperties" },
    Kind { prefix: "nccl-ib:", table: "ncclNetIb", properties: "ncclIbGetProperties" },
];

/// A plugin of NCCL's own and the file that it is in.
pub struct Builtin {
    kind: &'static Kind,
    file: PathBuf,
}

/// Values of symbols.
#[derive(Debug, Default)]
struct Symbols {
    exported: u64,
    table: u64,
    version: u32,
    get_device: u64,
    set_device: u64,
}

impl Builtin {
    /// `None` for the path of a plugin.
    pub fn named(path: &Path) -> Option<Builtin> {
        let text = path.to_str()?;
        KINDS.iter().find_map(|kind| text.strip_prefix(kind.prefix).map(|file| Builtin { kind, file: file.into() }))
    }

    /// Its table, if that has the wanted version. Not initialised.
    pub fn load(&self, version: Option<u32>) -> anyhow::Result<Plugin> {
        let symbols = self.symbols()?;
        if version.is_some_and(|wanted| wanted != symbols.version) {
            bail!("its {} is of version {}", self.kind.table, symbols.version);
        }
        // The loader would search its own places for a bare name.
        let name = CString::new(self.file.canonicalize()?.as_os_str().as_encoded_bytes())?;
        // SAFETY: loading runs the file's initialisers, which is what the caller asks for by naming it.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: what dlerror returns is a C string or NULL, which is ruled out behind an error.
            bail!(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
        }
        let exported = CString::new(EXPORTED)?;
        // SAFETY: a loaded library and the name of a symbol.
        let exported = unsafe { libc::dlsym(library, exported.as_ptr()) } as usize;
        if exported == 0 {
            bail!("it exports no {EXPORTED}");
        }
        let address = |value: u64| exported.wrapping_sub(symbols.exported as usize).wrapping_add(value as usize);
        stub::put(address(symbols.get_device), &stub::GET_DEVICE)?;
        stub::put(address(symbols.set_device), &stub::SET_DEVICE)?;
        // SAFETY: the symbol table of the loaded file says that the table is there.
        Ok(unsafe { Plugin::at(symbols.version, address(symbols.table) as *const *const c_void, library) })
    }

    /// What the file's symbol table says.
    fn symbols(&self) -> anyhow::Result<Symbols> {
        let file = File::open(&self.file)?;
        // SAFETY: a file that somebody cuts short while it is read ends this program, as it would end the loader.
        let bytes = unsafe { Mmap::map(&file) }?;
        let object = object::File::parse(&bytes[..]).map_err(|e| anyhow!("it is no shared library ({e})"))?;
        let mut found = Symbols::default();
        for symbol in object.symbols().filter(|symbol| symbol.is_definition()) {
            let Ok(name) = symbol.name() else { continue };
            match name {
                EXPORTED => found.exported = symbol.address(),
                "cudaGetDevice" if symbol.size() >= stub::GET_DEVICE.len() as u64 => found.get_device = symbol.address(),
                "cudaSetDevice" if symbol.size() >= stub::SET_DEVICE.len() as u64 => found.set_device = symbol.address(),
                _ if name == self.kind.table => found.table = symbol.address(),
                _ if name.contains(self.kind.properties) => found.version = version_in(name).unwrap_or(found.version),
                _ => {}
            }
        }
        let (table, version) = (self.kind.table, found.version);
        if [found.exported, found.table].contains(&0) || version == 0 {
            bail!("its symbol table shows no {table}: it is stripped, or it is not NCCL");
        }
        if !VERSIONS.contains(&version) {
            bail!("its {table} is of version {version}; 4 to 12 can be driven");
        }
        if [found.get_device, found.set_device].contains(&0) {
            bail!("the CUDA runtime is not linked into it");
        }
        Ok(found)
    }
}

/// The version in a mangled name: `_Z26ncclNetSocketGetPropertiesiP23ncclNetProperties_v12_t`.
fn version_in(name: &str) -> Option<u32> {
    let (_, rest) = name.split_once("ncclNetProperties_v")?;
    rest.split_once("_t")?.0.parse().ok()
}

/// A path that means the same in another folder and to another process; the file must be there.
pub fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    let (prefix, file) = match Builtin::named(path) {
        Some(Builtin { kind, file }) => (kind.prefix, file),
        None => ("", path.to_owned()),
    };
    let file = file.canonicalize().with_context(|| format!("cannot load {}", path.display()))?;
    let mut path = std::ffi::OsString::from(prefix);
    path.push(file);
    Ok(path.into())
}

/// What stands in for two functions of the CUDA runtime that is linked into NCCL. Its Socket asks which device is current when it connects, and
/// fails where there is no driver; the commands here move host memory alone.
mod stub {
    use super::*;

    /// `*device = 0; return cudaSuccess`
    #[cfg(target_arch = "x86_64")]
    pub const GET_DEVICE: [u8; 9] = [0xc7, 0x07, 0, 0, 0, 0, 0x31, 0xc0, 0xc3];
    /// `return cudaSuccess`
    #[cfg(target_arch = "x86_64")]
    pub const SET_DEVICE: [u8; 3] = [0x31, 0xc0, 0xc3];
    #[cfg(not(target_arch = "x86_64"))]
    pub const GET_DEVICE: [u8; 0] = [];
    #[cfg(not(target_arch = "x86_64"))]
    pub const SET_DEVICE: [u8; 0] = [];

    /// Replaces the beginning of a function, in this process alone.
    pub fn put(function: usize, code: &[u8]) -> anyhow::Result<()> {
        if code.is_empty() {
            bail!("NCCL's own plugins run without CUDA on x86_64 alone");
        }
        // SAFETY: plain library call.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let start = function & !(page - 1);
        let len = (function + code.len()).next_multiple_of(page) - start;
        let protect = |access: c_int| {
            // SAFETY: whole pages of a mapped library's code.
            match unsafe { libc::mprotect(start as *mut c_void, len, access) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()).context("its code cannot be changed (mprotect)"),
            }
        };
        // SAFETY: as below; read alone.
        if unsafe { std::slice::from_raw_parts(function as *const u8, code.len()) } == code {
            return Ok(());
        }
        protect(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
        // SAFETY: the symbol table says that the function begins there and is no shorter than `code`; the pages are writable and private to this
        // process. Nobody runs it meanwhile: it is done once, before anything of the library is called.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), function as *mut u8, code.len()) };
        protect(libc::PROT_READ | libc::PROT_EXEC)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        let file = |path: &str| Builtin::named(Path::new(path)).map(|builtin| (builtin.kind.table, builtin.file));
        assert_eq!(file("nccl:/a/b.so"), Some(("ncclNetSocket", "/a/b.so".into())));
        assert_eq!(file("nccl-ib:c.so"), Some(("ncclNetIb", "c.so".into())));
        assert_eq!(file("/nccl:/a"), None);
        assert_eq!(file("libnccl-net.so"), None);
    }

    #[test]
    fn the_version_is_read_from_a_mangled_name() {
        assert_eq!(version_in("_Z26ncclNetSocketGetPropertiesiP23ncclNetProperties_v12_t"), Some(12));
        assert_eq!(version_in("_ZZ19ncclIbGetPropertiesiP22ncclNetProperties_v9_tE8__func__"), Some(9));
        assert_eq!(version_in("ncclNetSocketGetPropertiesiP17ncclNetProperties"), None);
        assert_eq!(version_in("ncclNetProperties_vX_t"), None);
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused() {
        let builtin = |file: &Path| Builtin { kind: &KINDS[0], file: file.to_owned() };
        let program = std::env::current_exe().unwrap();
        let error = builtin(&program).load(None).err().unwrap().to_string();
        assert_eq!(error, "its symbol table shows no ncclNetSocket: it is stripped, or it is not NCCL");
        let error = builtin(Path::new("/etc/hostname")).load(None).err().unwrap().to_string();
        assert!(error.starts_with("it is no shared library"), "{error}");
    }
}
