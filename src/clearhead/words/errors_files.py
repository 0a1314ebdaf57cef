"""Errors of files in Chinese: reading and writing them, what the system says, and the files of trace and diagnose."""

CHINESE = {
    # core/files.py
    "{path} cannot be read: it has more than {size}.": "无法读取 {path}：它超过了 {size}。",
    "{path} cannot be read: {reason}.": "无法读取 {path}：{reason}。",
    "standard input cannot be read: {reason}.": "无法读取标准输入：{reason}。",
    "standard output cannot be written: {reason}.": "无法写入标准输出：{reason}。",
    "{path} cannot be written: its folder does not exist.": "无法写入 {path}：所在目录不存在。",
    "{path} cannot be written: {reason}.": "无法写入 {path}：{reason}。",
    "{path} does not exist.": "{path} 不存在。",
    "expected a file's name.": "应为文件名。",
    "the name is empty": "文件名为空",
    "{path} is not UTF-8 text: byte {place} is {byte}.": "{path} 不是 UTF-8 文本：第 {place} 个字节是 {byte}。",
    "{file} is not valid JSON: {reason}.": "{file} 不是合法的 JSON：{reason}。",
    "{file} is not valid JSON: the exponent of a number is out of range.": (
        "{file} 不是合法的 JSON：某个数的指数超出了范围。"
    ),
    "{file} holds a {type}: expected a JSON object.": "{file} 的内容是 {type}：应为 JSON 对象。",
    "{file} gives {name} twice.": "{file} 中 {name} 出现了两次。",
    "{file} has lists or objects more than {levels} levels deep.": "{file} 的列表或对象嵌套超过 {levels} 层。",
    "{path}: {wanted} would take {size} of memory, and {free} are free.": (
        "{path}：{wanted}需要 {size} 内存，而可用的只有 {free}。"
    ),
    "its arrays": "其中的数组",
    "this model in float32": "这个模型以 float32 存放",
    "its weights in float32": "其权重以 float32 存放",
    # the system's
    "No such file or directory": "没有这个文件或目录",
    "Permission denied": "没有权限",
    "Permission denied in {folder}": "在 {folder} 中没有权限",
    "Operation not permitted": "不允许此操作",
    "Is a directory": "这是一个目录",
    "Not a directory": "不是目录",
    "File name too long": "文件名过长",
    "No space left on device": "磁盘空间不足",
    "Bad file descriptor": "文件描述符无效",
    "Input/output error": "输入输出错误",
    "Read-only file system": "文件系统只读",
    "Address already in use": "端口已被占用",
    "embedded null byte": "文件名含有空字符",
    # json's
    "{reason}: line {line} column {column} (char {place})": "第 {line} 行第 {column} 列（字符 {place}），{reason}",
    "Expecting value": "此处应有一个值",
    "Expecting property name enclosed in double quotes": "此处应有用双引号括起的名称",
    "Expecting ',' delimiter": "此处应有逗号",
    "Expecting ':' delimiter": "此处应有冒号",
    "Extra data": "之后还有多余的内容",
    "Unterminated string starting at": "由此开始的字符串没有结束",
    "Invalid control character at": "此处有不允许的控制字符",
    "Invalid \\escape": "此处的转义不合法",
    "Invalid \\uXXXX escape": "此处的 \\uXXXX 转义不合法",
    "Illegal trailing comma before end of object": "对象末尾有多余的逗号",
    "Illegal trailing comma before end of array": "数组末尾有多余的逗号",
    "Exceeds the limit ({limit} digits) for integer string conversion: value has {digits} digits; "
    "use sys.set_int_max_str_digits() to increase the limit": "有一个整数长达 {digits} 位，超过 {limit} 位的上限",
    # core/array_files.py
    "{path} is a .npy file: one array without a name.": "{path} 是 .npy 文件：只有一个没有名称的数组。",
    "{path} is not a readable .npz file: {reason}.": "{path} 不是可读的 .npz 文件：{reason}。",
    "File is not a zip file": "它不是 zip 文件",
    "{path} is not a whole safetensors file: {reason}.": "{path} 不是完整的 safetensors 文件：{reason}。",
    "was the download or copy cut off?": "是否下载或复制时中断了？",
    "its metadata is not text": "其元数据不是文本",
    "its tensors overlap, or do not fill it": "其中的张量互相重叠，或没有填满文件",
    "its header is longer than the file": "文件头比文件还长",
    "its header is not UTF-8": "文件头不是 UTF-8",
    "{path} is not a whole safetensors file: its header is not valid JSON: {reason}.": (
        "{path} 不是完整的 safetensors 文件：文件头不是合法的 JSON：{reason}。"
    ),
    "{path} is not a whole safetensors file: its header holds a {type}: expected a JSON object.": (
        "{path} 不是完整的 safetensors 文件：文件头的内容是 {type}：应为 JSON 对象。"
    ),
    "{path} is not a whole safetensors file: its header gives {name} twice.": (
        "{path} 不是完整的 safetensors 文件：文件头中 {name} 出现了两次。"
    ),
    "{path} is not a whole safetensors file: its header has lists or objects more than {levels} levels deep.": (
        "{path} 不是完整的 safetensors 文件：文件头的列表或对象嵌套超过 {levels} 层。"
    ),
    "`{name}` has no dtype, shape and data_offsets": "`{name}` 没有 dtype、shape 和 data_offsets",
    "`{name}` has {size} bytes, which {dtype} of shape {shape} has not": (
        "`{name}` 有 {size} 个字节，与形状为 {shape} 的 {dtype} 不符"
    ),
    "{path} has {stored} MB and would become {claimed} GB: it is not read.": (
        "{path} 只有 {stored} MB，解压后却会变成 {claimed} GB，因此不读取。"
    ),
    "np.savez, which does not compress, writes what is really that large.": (
        "确实有这么大的数据，请用不压缩的 np.savez 写出。"
    ),
    "{name} is no array.": "{name} 不是数组。",
    "np.savez writes arrays only.": "np.savez 写出的只有数组。",
    "{name} has a header of version {version}: expected plain numbers.": (
        "{name} 的文件头版本为 {version}：应为普通的数。"
    ),
    "{name} holds pickled Python objects, which can run code: expected numbers.": (
        "{name} 含有 pickle 序列化的 Python 对象，可能执行代码：应为数。"
    ),
    "{name} claims shape {shape} of {dtype}, but has {rest} bytes.": (
        "{name} 声称是形状为 {shape} 的 {dtype}，却有 {rest} 个字节。"
    ),
    # textbook/case_file.py
    "{path} gives a name twice, in capitals and in small letters.": "{path} 中同一个名称出现了两次，大小写不同。",
    "{file} holds both {one} and {other}: give q, k, v, or a layer's x, w_q, w_k, w_v.": (
        "{file} 同时有 {one} 和 {other}：请给出 q、k、v，或一层的 x、w_q、w_k、w_v。"
    ),
    "{file} lacks {names}.": "{file} 缺少 {names}。",
    "it needs q, k, v, or a layer's x, w_q, w_k, w_v, or weights and v.": (
        "文件须有 q、k、v，或一层的 x、w_q、w_k、w_v，或 weights 和 v。"
    ),
    "{file} holds weights without q and k, and {name}, which acts before there are weights.": (
        "{file} 有 weights 而没有 q 和 k，又有在得出权重之前起作用的 {name}。"
    ),
    "leave {name} out, or give q, k and v: then the weights are checked.": (
        "去掉 {name}，或给出 q、k 和 v，这样会核对权重。"
    ),
    "{name} holds {value}: expected numbers.": "{name} 含有 {value}：应为数。",
    "{name} is not a list of equally long rows of numbers.": "{name} 不是由等长的数行组成的列表。",
    "{name} holds a number that is too large for float64: the largest is 1.8e308.": (
        "{name} 中有一个数超出 float64 的范围：最大为 1.8e308。"
    ),
    "it is NumPy's: np.savez writes a .npz file, which needs that ending.": (
        "这是 NumPy 的文件：np.savez 写出的 .npz 文件须保留扩展名 .npz。"
    ),
    'a .json file holds {"q": [[…]], "k": [[…]], "v": [[…]]}; .npz, .safetensors and .pt files need their endings.': (
        '.json 文件的内容形如 {"q": [[…]], "k": [[…]], "v": [[…]]}；.npz、.safetensors 和 .pt 文件须保留各自的扩展名。'
    ),
    "{file} is PyTorch's, which is not installed here.": "{file} 是 PyTorch 的文件，而这里没有安装 PyTorch。",
    "{file} holds objects other than tensors, numbers and texts, or is damaged: it is not opened ({error}).": (
        "{file} 含有张量、数和文本以外的对象，或已损坏，因此不打开（{error}）。"
    ),
    "{file} holds a {type}: expected names with their values.": "{file} 的内容是 {type}：应为名称及其值。",
    "{file} is a pickle, which can run any code when it is opened: it is not opened.": (
        "{file} 是 pickle 文件，打开时可能执行任意代码，因此不打开。"
    ),
    'np.savez("case.npz", q=q, k=k, v=v, theirs=out), '
    'or torch.save({"q": q, "k": k, "v": v, "theirs": out}, "case.pt")': (
        'np.savez("case.npz", q=q, k=k, v=v, theirs=out)，'
        '或 torch.save({"q": q, "k": k, "v": v, "theirs": out}, "case.pt")'
    ),
    # diagnosing/claims.py and diagnose.py
    "unknown key in {file}: `{name}`.": "{file} 中有未知的名称 `{name}`。",
    "{file} holds both {one} and {other}, which are the same.": "{file} 同时有 {one} 和 {other}，两者是同一个量。",
    "{file} claims {name}, a step of a layer.": "{file} 给出了 {name}，这是一层中的步骤。",
    "give the layer's x, w_q, w_k, w_v.": "请给出这一层的 x、w_q、w_k、w_v。",
    "the claimed {name} has shape {claimed}, but this step has shape {shape}.": (
        "文件给出的 {name} 形状为 {claimed}，而这一步的形状是 {shape}。"
    ),
    "{file} lacks theirs.": "{file} 缺少 theirs。",
    "it is what your code gave for these inputs.": "theirs 是您的代码对这些输入给出的结果。",
    "stage is {value}: where the weights are given, only the output can be wrong.": (
        "stage 为 {value}：权重已经给出，只有输出可能出错。"
    ),
    "stage is {value}: expected one of {stages}.": "stage 为 {value}：应为 {stages} 之一。",
    "theirs has shape {shape}: at stage {stage} expected {axes}.": (
        "theirs 的形状为 {shape}：在 {stage} 阶段应为 {axes}。"
    ),
    'it has the shape of the output: stage="output".': '它的形状与输出相同：stage="output"。',
    'it has the shape of the weights: stage="weights".': '它的形状与权重相同：stage="weights"。',
    "its last two axes are swapped: theirs.swapaxes(-1, -2).": "最后两个轴颠倒了：theirs.swapaxes(-1, -2)。",
    "it is (batch, queries, heads, …): theirs.swapaxes(-2, -3).": (
        "它是 (batch, queries, heads, …)：theirs.swapaxes(-2, -3)。"
    ),
    "its heads are joined: theirs.reshape({shape}).swapaxes(-2, -3).": (
        "它的头拼接在了一起：theirs.reshape({shape}).swapaxes(-2, -3)。"
    ),
    "it has as many numbers: a reshape may do, if their order is right.": (
        "元素个数相同：如果顺序正确，reshape 即可。"
    ),
}
