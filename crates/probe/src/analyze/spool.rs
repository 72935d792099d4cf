//! Results that are written as they come, so that they need no memory.

use std::{
    fs::File,
    io::{BufReader, BufWriter, Seek, SeekFrom, Write},
    path::Path,
};

use resolvent_lab::{Error, Result, disk::write_atomically_with};
use serde::Serialize;

use super::{Analysis, RESULTS};

/// The elements of a JSON array, in a file without a name.
#[derive(Debug)]
pub(super) struct Spool {
    file: BufWriter<File>,
    elements: usize,
}

impl Spool {
    pub(super) fn new(folder: &Path) -> Result<Self> {
        let file = tempfile::tempfile_in(folder).map_err(Error::io(folder, "cannot hold a temporary file"))?;
        Ok(Self { file: BufWriter::new(file), elements: 0 })
    }

    pub(super) fn add(&mut self, element: &impl Serialize) -> std::io::Result<()> {
        self.file.write_all(if self.elements == 0 { b"\n    " } else { b",\n    " })?;
        self.elements += 1;
        Ok(serde_json::to_writer(&mut self.file, element)?)
    }

    fn copy(self, out: &mut impl Write) -> std::io::Result<()> {
        let mut file = self.file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.seek(SeekFrom::Start(0))?;
        std::io::copy(&mut BufReader::new(file), out).map(drop)
    }
}

/// What there is one of per call or head.
#[derive(Debug)]
pub(super) struct Spools {
    pub calls: Spool,
    pub heads: Spool,
    pub distances: Spool,
}

impl Spools {
    pub(super) fn new(folder: &Path) -> Result<Self> {
        let spool = || Spool::new(folder);
        Ok(Self { calls: spool()?, heads: spool()?, distances: spool()? })
    }

    /// Writes the whole of the results: `analysis`, and the arrays after its fields.
    pub(super) fn write(self, folder: &Path, analysis: &Analysis) -> Result<()> {
        let path = folder.join(RESULTS);
        let text = serde_json::to_string_pretty(analysis).map_err(|e| Error::damaged(&path, e.to_string()))?;
        let fields = text.trim_end().trim_end_matches('}').trim_end();
        write_atomically_with(&path, |file| {
            let mut out = BufWriter::new(file);
            out.write_all(fields.as_bytes())?;
            for (name, spool) in [("calls", self.calls), ("heads", self.heads), ("distances", self.distances)] {
                write!(out, ",\n  \"{name}\": [")?;
                spool.copy(&mut out)?;
                out.write_all(b"\n  ]")?;
            }
            out.write_all(b"\n}\n")?;
            out.flush()
        })
    }
}
