//! From a file to a table, and what is wrong with a file that has none.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, anyhow, bail};

use super::{GARBAGE, Plugin, VERSIONS};

impl Plugin {
    /// The table of the newest version that `path` exports, or of `version`. Not initialised. The file stays loaded.
    pub fn load(path: &Path, version: Option<u32>) -> anyhow::Result<Plugin> {
        // SAFETY: loading runs the file's initialisers, which is what the user asked for by naming it.
        let library = unsafe { libloading::Library::new(path) };
        let library =
            library.map_err(|error| what_it_is(path).unwrap_or(error.into()).context(format!("cannot load {}", path.display())))?;
        let found = VERSIONS.iter().rev().filter(|&&v| version.is_none_or(|wanted| wanted == v)).find_map(|&v| {
            let symbol = CString::new(format!("ncclNetPlugin_v{v}")).ok()?;
            // SAFETY: only the symbol's address is taken.
            let table = unsafe { library.get::<*const *const c_void>(symbol.as_bytes_with_nul()) }.ok()?;
            // SAFETY: the address stays good as long as `library`, which the result keeps.
            Some((v, unsafe { table.try_as_raw_ptr() }?.cast_const().cast::<*const c_void>()))
        });
        let Some((version, table)) = found else {
            let wanted = version.map_or("v4 to v12".to_owned(), |v| format!("v{v}"));
            bail!("{} exports no ncclNetPlugin_{wanted}: it is no net plugin of that version", path.display());
        };
        Ok(Plugin { version, table, ctx: GARBAGE, _library: library })
    }

    /// The versions that `path` exports, oldest first.
    pub fn versions(path: &Path) -> anyhow::Result<Vec<u32>> {
        let all = VERSIONS.iter().filter(|&&v| Plugin::load(path, Some(v)).is_ok()).copied().collect::<Vec<_>>();
        if all.is_empty() {
            Plugin::load(path, None)?;
        }
        Ok(all)
    }

    /// Loads and initialises.
    pub fn start(path: &Path, version: Option<u32>) -> anyhow::Result<Plugin> {
        let mut plugin = Plugin::load(path, version)?;
        plugin.init().with_context(|| format!("{}: {}", path.display(), plugin.name()))?;
        Ok(plugin)
    }
}

/// What a file is that is no library at all: the loader speaks of headers then, or of files that it looked for elsewhere.
fn what_it_is(path: &Path) -> Option<anyhow::Error> {
    /// ELF files begin with it.
    const MAGIC: [u8; 4] = *b"\x7fELF";
    let mut head = [0; MAGIC.len()];
    match File::open(path).and_then(|mut file| file.read_exact(&mut head)) {
        Ok(()) if head == MAGIC => None,
        Ok(()) => Some(anyhow!("it is no shared library (it does not begin with \"\\x7fELF\")")),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Some(anyhow!("it is no shared library (it has fewer than four bytes)")),
        Err(e) if e.kind() == ErrorKind::IsADirectory => Some(anyhow!("it is a directory")),
        // Not there, or not to be read: the loader says so, and has more places to look.
        Err(_) => None,
    }
}
