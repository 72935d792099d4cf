//! Dumps are read within the budget that everything decoded shares, and what is no file is refused by name.

use std::{
    fs,
    io::{Cursor, Write},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use resolvent_lab::budget;
use resolvent_probe::analyze::Dump;
use safetensors::{Dtype, tensor::TensorView};
use tempfile::TempDir;
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

const MIB: usize = 1 << 20;

/// Sets the budget, which is the process's: one test at a time. All of it must be given back.
struct Limited(#[allow(dead_code, reason = "held for its lock")] MutexGuard<'static, ()>);

impl Limited {
    fn to(mebibytes: usize) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        budget::set_limit((mebibytes * MIB) as u64);
        Self(turn)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(budget::used(), 0, "bytes that nobody gave back");
        }
    }
}

fn npy(shape: &[usize], data: &[u8]) -> Vec<u8> {
    let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({},), }}", shape.join(", "));
    header += &" ".repeat(63 - (10 + header.len()) % 64);
    header.push('\n');
    [b"\x93NUMPY\x01\0", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn npz(method: CompressionMethod, members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        archive.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap().into_inner()
}

#[test]
fn unpacked_arrays_have_a_limit_and_stored_ones_need_none() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("d.npz");
    let members = [("q.npy", npy(&[1 << 16, 64], &vec![0; 16 * MIB]))];
    fs::write(&path, npz(CompressionMethod::Deflated, &members)).unwrap();
    let message = Dump::open(&path).unwrap_err().to_string();
    assert!(["d.npz/q.npy", "16.0 MiB", "--decode-limit"].iter().all(|part| message.contains(part)), "{message}");
    fs::write(&path, npz(CompressionMethod::Stored, &members)).unwrap();
    assert_eq!(Dump::open(&path).unwrap().layers().len(), 1);
    // What is of no layer is not unpacked.
    let small = npy(&[2, 2], &[0; 16]);
    let members = [("hidden.npy", members[0].1.clone()), ("q.npy", small)];
    fs::write(&path, npz(CompressionMethod::Deflated, &members)).unwrap();
    assert_eq!(Dump::open(&path).unwrap().unread(), ["hidden"]);
}

#[test]
fn a_flipped_byte_of_a_stored_array_is_seen() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("d.npz");
    for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
        let whole = npz(method, &[("q.npy", npy(&[8, 8], &(0..=255).collect::<Vec<u8>>()))]);
        fs::write(&path, &whole).unwrap();
        Dump::open(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[200] ^= 1;
        fs::write(&path, &flipped).unwrap();
        let message = Dump::open(&path).unwrap_err().to_string();
        assert!(message.contains("d.npz") && message.contains("write it again"), "{message}");
    }
}

/// Keys that all heads share are read once for each.
#[test]
fn shared_keys_count_once_for_each_head() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("d.safetensors");
    let (q, k) = (vec![0; 256 * 4 * 4], vec![0; 4096 * 4 * 4]);
    let view = |shape: [usize; 4], data| TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap();
    let tensors = [("q", view([1, 256, 1, 4], &q)), ("k", view([1, 1, 4096, 4], &k))];
    fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    let message = Dump::open(&path).unwrap().sequence(0, 0).unwrap_err().to_string();
    assert!(message.contains("d.safetensors") && message.contains("--decode-limit"), "{message}");
}

/// Nothing waits for the writer of a pipe.
#[cfg(unix)]
#[test]
fn a_pipe_is_no_dump() {
    let _limited = Limited::to(8);
    let folder = TempDir::new().unwrap();
    let pipe = folder.path().join("alone");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(Dump::open(&pipe).map(drop)));
    let told = receiver.recv_timeout(Duration::from_secs(20)).expect("it waits for a writer");
    let message = told.unwrap_err().to_string();
    assert!(message.contains("alone: is a pipe"), "{message}");
}
