//! Where the pictures of a folder, a tar archive (plain, gzip, xz, zstd) or a zip archive lie. Their bytes are read when they are
//! needed, but for those of compressed archives, which can only be read from the beginning and stay in memory.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    sync::Arc,
};

use zip::CompressionMethod;

use super::tar;
use crate::{
    budget::{Held, text_bytes},
    data::{Error, Result, reading::Counter},
    source,
};

/// Most bytes of one encoded picture; more is a mistake or an attack.
const MAX_FILE: u64 = 256 << 20;

/// Depth of folders that is still looked into; also what ends a circle of links.
const MAX_DEPTH: usize = 16;

/// A file of a folder or an archive.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its name within the folder or archive, slashes between folders.
    pub name: Box<str>,
    /// Its bytes.
    pub length: u64,
    pub location: Location,
}

/// Where the bytes of an entry are.
#[derive(Debug)]
pub(super) enum Location {
    /// In a file of its name, below the folder.
    Folder,
    /// In an archive.
    Archive {
        archive: Arc<Path>,
        offset: u64,
        /// Of a zip archive.
        zipped: Option<Zipped>,
    },
    /// Here.
    Memory(Box<[u8]>),
}

/// What a zip archive says of an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Zipped {
    deflated: bool,
    /// Its bytes in the archive.
    stored: u64,
    checksum: u32,
}

impl Entry {
    /// What it takes in a list, and its bytes if they are there.
    fn bytes(&self) -> u64 {
        let content = if matches!(self.location, Location::Memory(_)) { self.length } else { 0 };
        content + text_bytes(&self.name) + size_of::<Self>() as u64
    }

    /// The path that errors name, `root` being the folder.
    pub(super) fn path<'a>(&'a self, root: &'a Path) -> &'a Path {
        match &self.location {
            Location::Archive { archive, .. } => archive,
            _ => root,
        }
    }

    /// The error of this entry, `root` being the folder.
    pub(super) fn error(&self, root: &Path, problem: String) -> Error {
        Error::Entry { path: self.path(root).into(), entry: self.name.to_string(), problem }
    }

    /// Takes the bytes that it needs while it waits to be decoded.
    pub(super) fn waiting(&self, root: &Path) -> Result<Held> {
        match self.location {
            Location::Memory(_) => Ok(Held::new()),
            _ => Held::waiting(&self.path(root).join(&*self.name), self.length),
        }
    }

    /// Its first `most` bytes, or all if there are fewer; more where they are not to be had alone.
    pub(super) fn start(&self, root: &Path, most: u64) -> Result<Cow<'_, [u8]>> {
        let wanted = most.min(self.length);
        match &self.location {
            Location::Memory(bytes) => Ok(Cow::Borrowed(bytes)),
            Location::Folder => {
                let path = root.join(&*self.name);
                let file = source::file(&path)?;
                let length = file.metadata().map_err(|source| Error::io(&path, source))?.len();
                if length != self.length {
                    let problem = format!("had {} bytes and has {length} now; load the data again", self.length);
                    return Err(self.error(root, problem));
                }
                self.exactly(root, file, wanted).map(Cow::Owned)
            }
            Location::Archive { archive, offset, zipped } => {
                let mut file = source::file(archive)?;
                file.seek(SeekFrom::Start(*offset)).map_err(|source| Error::io(archive, source))?;
                match zipped {
                    // Of a part there is no checksum.
                    Some(zipped) if zipped.deflated || wanted == self.length => self.checked(root, file, zipped),
                    _ => self.exactly(root, file, wanted),
                }
                .map(Cow::Owned)
            }
        }
    }

    fn checked(&self, root: &Path, file: File, zipped: &Zipped) -> Result<Vec<u8>> {
        let stored = file.take(zipped.stored);
        let bytes = if zipped.deflated {
            self.exactly(root, flate2::read::DeflateDecoder::new(stored), self.length)?
        } else {
            self.exactly(root, stored, self.length)?
        };
        if crc32fast::hash(&bytes) == zipped.checksum {
            return Ok(bytes);
        }
        Err(self.error(root, "cannot be read (wrong checksum); fetch the data again".into()))
    }

    fn exactly(&self, root: &Path, reader: impl Read, wanted: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(wanted as usize + 1);
        let read = reader.take(wanted).read_to_end(&mut bytes);
        read.map_err(|source| self.error(root, format!("cannot be read ({source}); fetch the data again")))?;
        if bytes.len() as u64 == wanted {
            return Ok(bytes);
        }
        let problem = format!("has not the {} bytes that it should have; fetch the data again", self.length);
        Err(self.error(root, problem))
    }
}

/// What a name says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A picture.
    Picture,
    /// A small file that is needed to load the set, and is read at once.
    Label,
    /// Anything else.
    Other,
    /// Hidden, or made by a desktop system: no part of the set.
    Ignored,
}

/// What names of pictures end in.
pub(crate) const PICTURES: [&str; 4] = ["png", "jpg", "jpeg", "webp"];

/// Pictures by their endings, and nothing else.
pub(super) fn by_ending(name: &str) -> Kind {
    match name {
        _ if is_ignored(name) => Kind::Ignored,
        _ if is_picture(name) => Kind::Picture,
        _ => Kind::Other,
    }
}

/// Whether a name ends as that of a picture.
pub(crate) fn is_picture(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, ending)| PICTURES.contains(&&*ending.to_lowercase()))
}

/// Whether a file is hidden or made by a desktop system.
pub(super) fn is_ignored(name: &str) -> bool {
    let hidden = |part: &str| part.starts_with('.') && part != "." && part != "..";
    name.split('/').any(|part| hidden(part) || ["__MACOSX", "Thumbs.db", "desktop.ini"].contains(&part))
}

/// The files of a folder or an archive, sorted by name.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub pictures: Vec<Entry>,
    pub labels: Vec<Entry>,
    /// Names of all other files.
    pub others: Vec<String>,
}

/// What is looked for, and who is told.
pub(super) struct Search<'a> {
    pub path: &'a Path,
    pub kind: &'a (dyn Fn(&str) -> Kind + Sync),
    pub held: &'a Held,
    pub found: &'a Counter<'a>,
}

impl Search<'_> {
    /// Lists the folder or archive.
    ///
    /// # Errors
    /// Any [`Error`]; [`Error::Entry`] for a name that occurs twice.
    pub(super) fn run(&self) -> Result<Found> {
        let mut found = Found::default();
        if self.path.is_dir() {
            self.folder(self.path, "", 0, &mut found)?;
        } else if source::starts_with(self.path, b"PK")? {
            self.zip(&mut found)?;
        } else {
            tar::read(self, &mut found)?;
        }
        for entries in [&mut found.pictures, &mut found.labels] {
            entries.sort_unstable_by(|left, right| left.name.cmp(&right.name));
            if let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
                return Err(pair[0].error(self.path, "occurs twice; pack the archive again, each name once".into()));
            }
        }
        Ok(found)
    }

    fn folder(&self, folder: &Path, prefix: &str, depth: usize, found: &mut Found) -> Result<()> {
        if depth > MAX_DEPTH {
            let problem = format!("is nested deeper than {MAX_DEPTH} folders; is there a circle of links?");
            return Err(self.error(prefix, problem));
        }
        for path in source::entries(folder)? {
            let name = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
            let about = path.metadata().map_err(|source| Error::io(&path, source))?;
            if about.is_dir() {
                if !is_ignored(&name) {
                    self.folder(&path, &format!("{name}/"), depth + 1, found)?;
                }
                continue;
            }
            // Opening refuses what is no ordinary file; a length alone does not.
            if (self.kind)(&name) == Kind::Picture && !about.is_file() {
                source::file(&path)?;
            }
            self.add(name, about.len(), found, || Ok(Location::Folder))?;
        }
        Ok(())
    }

    fn zip(&self, found: &mut Found) -> Result<()> {
        let path = self.path;
        let damaged = |problem: &dyn std::fmt::Display| Error::Format {
            path: path.into(),
            problem: format!("cannot be read as a zip archive ({problem}); fetch it again"),
        };
        let shared: Arc<Path> = path.into();
        let mut archive = source::zip(path, damaged)?;
        for index in 0..archive.len() {
            let entry = archive.by_index(index).map_err(|e| damaged(&e))?;
            let name = entry.name().map_err(|e| damaged(&e))?.into_owned();
            if !entry.is_file() {
                continue;
            }
            let at = || {
                let offset = entry.data_start().ok_or_else(|| damaged(&"an entry without a place"))?;
                let deflated = match entry.compression() {
                    CompressionMethod::Stored => false,
                    CompressionMethod::Deflated => true,
                    other => return Err(damaged(&format!("`{name}` is compressed as {other}, expected deflate"))),
                };
                let zipped = Zipped { deflated, stored: entry.compressed_size(), checksum: entry.crc32() };
                Ok(Location::Archive { archive: shared.clone(), offset, zipped: Some(zipped) })
            };
            self.add(name.clone(), entry.size(), found, at)?;
        }
        Ok(())
    }

    /// Adds the file `name` of `length` bytes, which lies where `location` says.
    pub(super) fn add(
        &self,
        name: String,
        length: u64,
        found: &mut Found,
        location: impl FnOnce() -> Result<Location>,
    ) -> Result<()> {
        let kind = (self.kind)(&name);
        match kind {
            Kind::Ignored => {}
            Kind::Other => {
                self.held.add(self.path, text_bytes(&name))?;
                found.others.push(name);
            }
            Kind::Picture | Kind::Label => {
                if length > MAX_FILE {
                    return Err(self.error(&name, "has more than 256 MiB; is it a picture?".into()));
                }
                let entry = Entry { name: name.into(), length, location: location()? };
                self.held.add(&self.path.join(&*entry.name), entry.bytes())?;
                self.found.one();
                if kind == Kind::Picture { found.pictures.push(entry) } else { found.labels.push(entry) }
            }
        }
        Ok(())
    }

    pub(super) fn error(&self, name: &str, problem: String) -> Error {
        Error::Entry { path: self.path.into(), entry: name.into(), problem }
    }

    /// The bytes of the entry `name`, of which there are `length`, that `reader` gives.
    pub(super) fn content(&self, name: &str, length: u64, reader: impl Read) -> Result<Location> {
        if length > MAX_FILE {
            return Err(self.error(name, "has more than 256 MiB; is it a picture?".into()));
        }
        let mut bytes = Vec::new();
        let room = Held::new();
        room.add(&self.path.join(name), length)?;
        bytes.reserve_exact(length as usize);
        let read = reader.take(length).read_to_end(&mut bytes);
        read.map_err(|source| self.error(name, format!("cannot be read ({source}); fetch the data again")))?;
        if bytes.len() as u64 != length {
            let problem = format!("has not the {length} bytes that it should have; fetch the data again");
            return Err(self.error(name, problem));
        }
        Ok(Location::Memory(bytes.into()))
    }
}

/// Opens an archive that is read where its entries lie.
pub(super) fn plain(path: &Path) -> Result<(File, u64)> {
    let file = source::file(path)?;
    let length = file.metadata().map_err(|source: io::Error| Error::io(path, source))?.len();
    Ok((file, length))
}
