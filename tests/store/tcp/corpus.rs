//! The fuzzer's corpus against a running server: whole, in pieces, and spoiled at random. Whatever comes, the others are served.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::Path;

use railhead::store::Store;

use super::wire::Raw;
use super::{join, serve};

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/store_wire");
    let entries = std::fs::read_dir(&folder).expect("the corpus");
    let read = |path: std::path::PathBuf| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap());
    let mut files: Vec<_> = entries.map(|entry| read(entry.unwrap().path())).collect();
    files.sort();
    assert!(files.len() >= 20, "{} files", files.len());
    files
}

/// Sends bytes and leaves; the server may have hung up before.
fn send(port: u16, bytes: &[u8], piece: usize) {
    let mut raw = Raw::connect(port);
    for piece in bytes.chunks(piece.max(1)) {
        if raw.0.write_all(piece).is_err() {
            return;
        }
    }
    let _ = raw.0.shutdown(Shutdown::Write);
    let _ = raw.0.read_to_end(&mut Vec::new());
}

#[test]
fn every_file_of_it_in_any_pieces_leaves_the_server_serving() {
    let server = serve(|options| options.memory = 64 << 20);
    let other = join(server.port());
    for (index, (name, bytes)) in corpus().into_iter().enumerate() {
        for piece in [1, 3, 7, usize::MAX] {
            send(server.port(), &bytes, piece);
        }
        for cut in 0..bytes.len().min(40) {
            send(server.port(), &bytes[..cut], usize::MAX);
        }
        assert_eq!(other.add("still here", 1).unwrap(), index as i64 + 1, "{name}");
    }
}

#[test]
fn random_changes_to_it_leave_the_server_serving() {
    const ROUNDS: u64 = 400;
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut state = seed | 1;
    let mut random = move || {
        // xorshift64* (Marsaglia 2003, Vigna 2016).
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_F491_4F6C_DD1D) as usize
    };
    let files = corpus();
    let server = serve(|options| options.memory = 64 << 20);
    let other = join(server.port());
    for round in 0..ROUNDS {
        let mut bytes = files[random() % files.len()].1.clone();
        bytes.extend(&files[random() % files.len()].1);
        for _ in 0..1 + random() % 4 {
            let at = random() % bytes.len();
            match random() % 3 {
                0 => bytes[at] = random() as u8,
                1 => drop(bytes.drain(at..(at + random() % 9).min(bytes.len()))),
                _ => bytes.insert(at, random() as u8),
            }
            if bytes.is_empty() {
                break;
            }
        }
        send(server.port(), &bytes, 1 + random() % 64);
        assert_eq!(other.add("still here", 1).unwrap(), round as i64 + 1);
    }
}
