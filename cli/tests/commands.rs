//! The commands as users call them.

use serde_json::Value;
use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

fn anymesh(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anymesh"))
        .args(args)
        .output()
        .unwrap()
}

fn text(args: &[&str]) -> String {
    let out = anymesh(args);
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

/// Sends lines to a command and reads one JSON answer for each.
fn lines(args: &[&str], input: &str) -> Vec<Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_anymesh"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

#[test]
fn plan_prints_steps_bytes_and_the_bound() {
    let out = text(&[
        "plan",
        "--mesh",
        "dp=2,tp=4",
        "--from",
        "f32[64@dp,64]",
        "--to",
        "f32[64,64@tp]",
        "--objective",
        "bytes",
    ]);
    assert!(
        out.contains("lower bound") && out.contains("f32[64@dp, 64] -> f32[64, 64@tp]"),
        "{out}"
    );
}

#[test]
fn plan_answers_json_lines_and_survives_bad_ones() {
    let request = r#"{"mesh":[2,4],"shape":[64,64],"dtype":"f32","from":{"dims":[[1],[]],"partial":[]},"to":{"dims":[[],[1]],"partial":[]},"objective":"bytes"}"#;
    let answers = lines(
        &["plan", "--jsonl"],
        &format!("{request}\nnonsense\n{{\"mesh\":[2]}}\n{request}\n"),
    );
    assert_eq!(answers.len(), 4);
    assert_eq!(
        (&answers[0]["recv_bytes"], &answers[0]["lower_bound"]),
        (&Value::from(3072), &Value::from(3072))
    );
    assert_eq!(answers[1]["ok"], false);
    assert!(
        answers[2]["error"].as_str().unwrap().contains("shape"),
        "{}",
        answers[2]
    );
    assert_eq!(answers[3], answers[0]);
}

#[test]
fn rule_explains_letters_choices_and_results() {
    let out = text(&[
        "rule",
        "matmul",
        "--mesh",
        "dp=2,tp=4",
        "--in",
        "f32[64@dp,32]",
        "--in",
        "f32[32,64@tp]",
        "--run",
    ]);
    for part in [
        "reduce k sum",
        "m = 64",
        "chosen",
        "result 0: f32[64@dp, 64@tp]",
        "unsharded result on seeded data: 0",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
}

#[test]
fn rule_answers_json_lines() {
    let request = r#"{"op":"matmul","attrs":{},"mesh":[2,4],"inputs":[{"shape":[64,32],"dtype":"f32","dims":[[0],[1]],"partial":[]},{"shape":[32,16],"dtype":"f32","dims":[[1],[]],"partial":[]}],"run":true}"#;
    let unknown = r#"{"op":"matmull","mesh":[2],"inputs":[]}"#;
    let answers = lines(&["rule", "--jsonl"], &format!("{request}\n{unknown}\n"));
    assert_eq!(
        (
            &answers[0]["ok"],
            &answers[0]["recv_bytes"],
            &answers[0]["max_difference"]
        ),
        (&true.into(), &0.into(), &0.0.into())
    );
    assert_eq!(
        answers[0]["outputs"][0]["partial"],
        serde_json::json!([[1, "sum"]])
    );
    assert!(
        answers[1]["error"]
            .as_str()
            .unwrap()
            .contains("did you mean matmul"),
        "{}",
        answers[1]
    );
}

#[test]
fn rule_lists_every_op() {
    let list: Vec<Value> = serde_json::from_str(&text(&["rule", "--list"])).unwrap();
    assert!(list.len() > 250);
    assert!(
        list.iter()
            .all(|op| op["rule"].is_string() && op["attrs"].is_array())
    );
}

#[test]
fn show_draws_which_rank_holds_what() {
    let out = text(&["show", "f32[8@dp,16@tp]", "--mesh", "dp=2,tp=2"]);
    assert!(
        out.contains("0..8") && out.contains("8..16") && out.contains("│"),
        "{out}"
    );
    let svg = std::env::temp_dir().join(format!("anymesh-show-{}.svg", std::process::id()));
    text(&[
        "show",
        "f32[8@dp,16]",
        "--mesh",
        "dp=2,tp=2",
        "--svg",
        svg.to_str().unwrap(),
        "--json",
    ]);
    assert!(std::fs::read_to_string(&svg).unwrap().contains("<svg"));
    std::fs::remove_file(svg).unwrap();
}

#[test]
fn commands_draw_and_write_pages() {
    let folder = std::env::temp_dir().join(format!("anymesh-draw-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let rule = [
        "rule",
        "matmul",
        "--mesh",
        "dp=2,tp=4",
        "--in",
        "f32[64@dp,32]",
        "--in",
        "f32[32@tp,64]",
    ];
    let plan = [
        "plan",
        "--mesh",
        "dp=2,tp=4",
        "--from",
        "f32[64@dp,64]",
        "--to",
        "f32[64,64@tp]",
    ];
    let show = ["show", "f32[8@dp,16,4@tp]", "--mesh", "dp=2,tp=2"];
    for (name, command, word) in [
        ("rule", &rule[..], "matmul"),
        ("plan", &plan[..], "f32[64@dp, 64]"),
        ("show", &show[..], "dimension 2 cut by tp"),
    ] {
        let (svg, html) = (file(&format!("{name}.svg")), file(&format!("{name}.html")));
        let said = text(&[command, &["--svg", &svg, "--html", &html]].concat());
        let printed = text(command);
        assert_eq!(
            said.lines().next(),
            printed.lines().next(),
            "the same is printed"
        );
        let (svg, html) = (std::fs::read_to_string(svg), std::fs::read_to_string(html));
        let (svg, html) = (svg.unwrap(), html.unwrap());
        assert!(svg.starts_with("<svg") && svg.contains(word), "{svg}");
        assert!(
            html.starts_with("<!DOCTYPE html>") && html.contains(word),
            "{html}"
        );
        // `-` prints the picture and nothing else.
        assert_eq!(text(&[command, &["--svg", "-"]].concat()), svg);
        let page = text(&[command, &["--html", "-", "--json"]].concat());
        assert!(
            page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"),
            "{page}"
        );
        let both = anymesh(&[command, &["--html", "-", "--svg", "-"]].concat());
        assert!(!both.status.success() && both.stdout.is_empty());
    }
    let nowhere = anymesh(&[&show[..], &["--svg", &file("no/such/folder.svg")]].concat());
    let error = String::from_utf8(nowhere.stderr).unwrap();
    assert!(
        !nowhere.status.success() && error.contains("cannot write"),
        "{error}"
    );
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let out = anymesh(&["show", "f32[8@xx]", "--mesh", "dp=2"]);
    assert!(!out.status.success());
    assert_eq!(
        String::from_utf8(out.stderr).unwrap().trim(),
        "mesh: there is no axis 'xx' in mesh(dp=2); where a program may run without it, write @xx?"
    );
}
