"""Errors of the command line's options in Chinese: argparse's own, and those of cli.py, arguments.py, lessons.py."""

CHINESE = {
    # argparse's
    "argument {argument}": "参数 {argument}",
    "the following arguments are required: {arguments}": "缺少参数：{arguments}",
    "unrecognized arguments: {arguments}": "无法识别的参数：{arguments}",
    "invalid choice: {given} (choose from {choices})": "没有 {given} 这个选择，可选：{choices}",
    "expected one argument": "后面需要一个值",
    "ignored explicit argument {given}": "不接受值 {given}",
    "ambiguous option: {option} could match {options}": "选项 {option} 有歧义，可能是 {options}",
    "{program} --help shows examples.": "{program} --help 显示示例。",
    # arguments.py
    "{option} stands before the command: options go after it, as in clearhead explain … {option}": (
        "{option} 写在了命令之前：选项应放在命令之后，如 clearhead explain … {option}"
    ),
    "--lang {language}: {command} prints English only": "--lang {language}：{command} 只输出英文",
    "it is empty: leave it out for its default": "值为空：要用默认值就不要写它",
    "it holds a NUL character": "含有 NUL 字符",
    "expected a whole number, not {given}": "应为整数，而不是 {given}",
    "--exact is {given}: expected layer.head pairs.": "--exact 为 {given}：应为若干“层.头”。",
    "{name} is {value}: expected whole numbers with commas.": "{name} 为 {value}：应为以逗号分隔的整数。",
    # cli.py
    "interrupted": "已中断",
    "standard output: {reason}.": "标准输出：{reason}。",
    "there is not enough memory for this.": "内存不足，无法完成。",
    "--json - and --html - both write to standard output.": "--json - 和 --html - 都要写到标准输出。",
    "name a file for one of them.": "请为其中一个指定文件。",
    "expected TEXT: {given} follows --why.": "缺少 TEXT：{given} 跟在 --why 后面，被当作它的值。",
    "expected TEXT or --file, one of them.": "TEXT 和 --file 须给出其中一个，且只给一个。",
    "--cut, --boost and --off are for one run of a text, not for windows or the page of a file's every head.": (
        "--cut、--boost 和 --off 只用于文本的单次运行，不能用于窗口，也不能用于显示文件全部头的网页。"
    ),
    "--windows is for the text of a file.": "--windows 只用于文件中的文本。",
    "the text is empty: there is no token to explain.": "文本为空：没有可以解释的词元。",
    "--exact and --dtype are for the page of a long text.": "--exact 和 --dtype 只用于长文本的网页。",
    "--against is for --why.": "--against 须与 --why 合用。",
    "--why is for what follows a whole text, not for --{name}.": (
        "--why 解释的是整段文本之后的词元，不能与 --{name} 合用。"
    ),
    "end TEXT with that token.": "请让 TEXT 以该词元结尾。",
    "leave --{name} out.": "请去掉 --{name}。",
    "--{name} is for one token, and --file with --html shows every head of all tokens.": (
        "--{name} 只针对一个词元，而 --file 与 --html 合用会显示所有词元的每一个头。"
    ),
    "view needs Starlette and Uvicorn, which are not installed ({error}).": (
        "view 需要 Starlette 和 Uvicorn，但它们没有安装（{error}）。"
    ),
    "expected FILE, or --text-file with a model.": "请给出 FILE，或用 --text-file 加一个模型。",
    # lessons.py and its reports
    "--step is {step}: expected 0 to {last}.": "--step 为 {step}：应在 0 到 {last} 之间。",
    "--num-heads shows all heads side by side, and goes without --{name}.": (
        "--num-heads 会并排显示所有的头，不能与 --{name} 合用。"
    ),
    "--num-heads is for a layer: x, w_q, w_k, w_v, and w_o if there is one.": (
        "--num-heads 只用于层：文件须有 x、w_q、w_k、w_v，以及 w_o（如果有）。"
    ),
    "head {place} is outside 0..{last}: the file has {count} head.": "头 {place} 超出 0..{last}：文件有 {count} 个头。",
    "head {place} is outside 0..{last}: the file has {count} heads.": (
        "头 {place} 超出 0..{last}：文件有 {count} 个头。"
    ),
    "batch {place} is outside 0..{last}: the file has {count} batch.": (
        "批次条目 {place} 超出 0..{last}：文件有 {count} 个批次条目。"
    ),
    "batch {place} is outside 0..{last}: the file has {count} batch entries.": (
        "批次条目 {place} 超出 0..{last}：文件有 {count} 个批次条目。"
    ),
    "query {place} is outside 0..{last}: the file has {count} query.": (
        "查询 {place} 超出 0..{last}：文件有 {count} 个查询。"
    ),
    "query {place} is outside 0..{last}: the file has {count} queries.": (
        "查询 {place} 超出 0..{last}：文件有 {count} 个查询。"
    ),
    "{count} numbers of heads: expected two to {most}.": "给出了 {count} 种头数：应为 2 到 {most} 种。",
    "1 and 8, for example.": "例如 1 和 8。",
    # textbook/layer_shapes.py, symbols.py and why_scale.py
    "unknown size `{name}`.": "没有名为 `{name}` 的尺寸。",
    "unknown rule `{name}`.": "没有名为 `{name}` 的规则。",
    "Known: {names}.": "可用：{names}。",
    "did you mean `{near}`? Known: {names}.": "是否想写 `{near}`？可用：{names}。",
    "{name} is {value}: expected a whole number from 1 up.": "{name} 为 {value}：应为不小于 1 的整数。",
    "d_model {width} is not divisible by h {heads}.": "d_model {width} 不能被 h {heads} 整除。",
    "give d_k as well.": "请同时给出 d_k。",
    "there is no width to show.": "没有可显示的宽度。",
    "why_scale((1, 4, 16)), for example.": "例如 why_scale((1, 4, 16))。",
    # view
    "port is {port}: expected 0 to 65535.": "端口为 {port}：应在 0 到 65535 之间。",
    "port {port} cannot be used: {reason}.": "端口 {port} 无法使用：{reason}。",
    "leave --port out for a free one.": "去掉 --port 会自动选择空闲端口。",
}
