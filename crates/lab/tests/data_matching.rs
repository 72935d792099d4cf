//! Pairs of documents from the files of "Long Range Arena", and what is said of files that cannot be used.

use std::{fs, io::Write, path::Path};

use resolvent_lab::data::{Data, DataSpec, Error, MatchDataset, Result};

fn load(spec: &str) -> Result<MatchDataset> {
    match spec.parse::<DataSpec>()?.load()? {
        Data::Matches(matches) => Ok(*matches),
        other => panic!("{other:?}"),
    }
}

fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (part, bytes) in files {
        fs::write(folder.path().join(format!("new_aan_pairs.{part}")), bytes).unwrap();
    }
    folder
}

fn at(path: &Path, settings: &str) -> String {
    format!("retrieval:{}{settings}", path.display())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const TRAIN: &[u8] = b"1.0\tP07-1\tW04-2\tb'A \"paper\"'\tanother\n0\t\t\tone, two\tthree\r\n0.0\ta\tb\tlast\tline";
const TEST: &[u8] = b"1\ta\tb\tfirst\tsecond\n";

#[test]
fn the_three_parts_are_read_as_published() {
    let files = folder(&[("train.tsv", TRAIN), ("eval.tsv", TEST), ("test.tsv.gz", &gzip(TEST))]);
    let data = load(&at(files.path(), "")).unwrap();
    assert_eq!(data.classes, ["unrelated", "related"]);
    assert_eq!(data.train.labels, [1, 0, 0]);
    assert_eq!(data.train.texts[0], ["b'A \"paper\"'", "one, two", "last"], "quotes are no mark-up");
    assert_eq!(data.train.texts[1], ["another", "three", "line"]);
    assert_eq!(data.validation.as_ref(), Some(&data.test));
    assert_eq!((&data.test.texts[0][0][..], &data.test.texts[1][0][..], data.test.labels[0]), ("first", "second", 1));
    let without = load(&at(folder(&[("train.tsv", TRAIN), ("test.tsv", TEST)]).path(), "")).unwrap();
    assert_eq!((&without.validation, &without.train), (&None, &data.train));
    assert_ne!(without.fingerprint(), data.fingerprint());
    let spec = at(files.path(), "?bytes=7");
    assert_eq!(spec.parse::<DataSpec>().unwrap().to_string(), spec);
    assert_eq!(at(files.path(), "").parse::<DataSpec>().unwrap().to_string(), at(files.path(), "?bytes=4000"));
}

#[test]
fn documents_are_cut_between_characters_and_lines_may_be_of_any_length() {
    // Longer than what is read from a file at once; the second document ends in two bytes of a letter.
    let long = format!("1\tx\ty\t{}\t{}é and more\n", "word ".repeat(100_000), "é".repeat(4));
    let files = folder(&[("train.tsv", (long.clone() + &long).as_bytes()), ("test.tsv", TEST)]);
    let cut = |bytes: usize| load(&at(files.path(), &format!("?bytes={bytes}"))).unwrap().train;
    let split = cut(9);
    assert_eq!((&split.texts[0][0][..], &split.texts[1][1][..]), ("word word", "éééé"));
    assert_eq!(cut(10).texts[1][0], "ééééé");
    assert_eq!(cut(400_000).texts[0][1].len(), 400_000);
    let whole = load(&at(files.path(), "")).unwrap().train;
    assert_eq!((whole.texts[0][0].len(), &whole.texts[1][0][..]), (4000, "ééééé and more"));
    // What lies behind the cut is not looked at.
    let files = folder(&[("train.tsv", b"1\ta\tb\tgood\xff\tgood\n"), ("test.tsv", TEST)]);
    assert_eq!(load(&at(files.path(), "?bytes=4")).unwrap().train.texts[0], ["good"]);
    assert!(load(&at(files.path(), "?bytes=5")).is_err());
}

#[test]
fn what_cannot_be_used_is_named_with_file_and_line() {
    let good = "1\ta\tb\tfirst\tsecond\n";
    let cases: Vec<(Vec<u8>, &[&str])> = vec![
        ((good.to_owned() + "1\ta\tfirst\tsecond\n").into(), &["line 2 has 4 columns, expected 5", "tabs"]),
        ((good.to_owned() + "1\ta\tb\tfirst\tsecond\tthird\n").into(), &["line 2 has 6 columns"]),
        ((good.to_owned() + "\n" + good).into(), &["line 2 is empty; remove it"]),
        ((good.to_owned() + "\r\n" + good).into(), &["line 2 is empty"]),
        (
            ("label\tid1\tid2\ttext1\ttext2\n".to_owned() + good).into(),
            &["line 1 has the label `label`", "0 or 1", "header"],
        ),
        ("2\ta\tb\tfirst\tsecond\n".into(), &["line 1 has the label `2`"]),
        ("\ta\tb\tfirst\tsecond\n".into(), &["line 1 has the label ``"]),
        ((good.to_owned() + "0\ta\tb\t \tsecond\n").into(), &["line 2 has an empty first document"]),
        ((good.to_owned() + "0\ta\tb\tfirst\t\r\n").into(), &["line 2 has an empty second document"]),
        (vec![], &["holds no pairs", "fetch it again"]),
        ([good.as_bytes(), b"1\ta\tb\tfir\xffst\tsecond\n"].concat(), &["line 2 is not UTF-8", "convert"]),
        // Cut off inside of a letter, by the end of the line and not by the limit of bytes.
        ([good.as_bytes(), b"1\ta\tb\tfirst\tsecond\xc3\n"].concat(), &["line 2 is not UTF-8"]),
    ];
    for (bytes, expected) in cases {
        let files = folder(&[("train.tsv", TRAIN), ("test.tsv", &bytes)]);
        let error = load(&at(files.path(), "")).unwrap_err();
        let typed =
            if bytes.is_empty() { matches!(error, Error::Empty { .. }) } else { matches!(error, Error::Line { .. }) };
        assert!(typed, "{error:?}");
        let message = error.to_string();
        for part in expected.iter().chain(&["new_aan_pairs.test.tsv"]) {
            assert!(message.contains(part) && !message.contains('\n'), "`{message}` lacks `{part}`");
        }
    }
}

#[test]
fn folders_that_hold_something_else_are_named() {
    let message = |files: &[(&str, &[u8])]| load(&at(folder(files).path(), "")).unwrap_err().to_string();
    let missing = message(&[("train.tsv", TRAIN)]);
    assert!(missing.contains("new_aan_pairs.test.tsv: not found") && missing.contains("must hold"), "{missing}");
    let both = message(&[("train.tsv", TRAIN), ("train.tsv.gz", &gzip(TRAIN)), ("test.tsv", TEST)]);
    assert!(both.contains("`new_aan_pairs.train.tsv` and `new_aan_pairs.train.tsv.gz` are both there"), "{both}");
    let cut_off = message(&[("train.tsv", TRAIN), ("test.tsv.gz", &gzip(TEST)[..20])]);
    assert!(cut_off.contains("new_aan_pairs.test.tsv.gz") && cut_off.contains("fetch it again"), "{cut_off}");
    let files = folder(&[("train.tsv", TRAIN), ("test.tsv", TEST)]);
    let file = files.path().join("new_aan_pairs.train.tsv");
    assert!(load(&at(&file, "")).unwrap_err().to_string().contains("expected a folder"));
    for (spec, part) in [
        ("retrieval", "`retrieval:PATH`"),
        ("retrieval:", "`retrieval:PATH`"),
        ("retrieval:x?bytes=0", "`bytes`"),
        ("retrieval:x?bytes=9999999", "`bytes`"),
        ("retrieval:x?bytes=many", "`bytes`"),
        ("retrieval:x?words=4", "`words=4`"),
        ("documents:topics=1", "`topics`"),
        ("papers:x", "retrieval:DIR"),
    ] {
        let message = spec.parse::<DataSpec>().unwrap_err().to_string();
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}
