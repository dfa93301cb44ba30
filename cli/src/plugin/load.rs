//! From a file to a table, and what is wrong with a file that has none.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, anyhow, bail};

use super::builtin::Builtin;
use super::{Plugin, VERSIONS};

impl Plugin {
    /// The table of the newest version that `path` exports, or of `version`; or one of NCCL's own. Not initialised.
    pub fn load(path: &Path, version: Option<u32>) -> anyhow::Result<Plugin> {
        if let Some(builtin) = Builtin::named(path) {
            return builtin.load(version).with_context(|| format!("cannot load {}", path.display()));
        }
        for &v in VERSIONS.iter().rev().filter(|&&v| version.is_none_or(|wanted| wanted == v)) {
            match Plugin::open(path, v) {
                Ok(plugin) => return Ok(plugin),
                Err(None) => {}
                Err(Some(why)) => {
                    return Err(what_it_is(path).unwrap_or(anyhow!(why)).context(format!("cannot load {}", path.display())));
                }
            }
        }
        let wanted = version.map_or("v4 to v12".to_owned(), |v| format!("v{v}"));
        bail!("{} exports no ncclNetPlugin_{wanted}: it is no net plugin of that version", path.display());
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
