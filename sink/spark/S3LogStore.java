import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.AWSUnsupportedFeatureException;
import org.apache.hadoop.fs.s3a.RemoteFileChangedException;

/**
 * Writes commits of Delta tables on S3 so that drivers exclude each other: by a PUT with "If-None-Match: *" (Hadoop's
 * fs.option.create.conditional.overwrite, since 3.4.2). Of a store that ignores this, it still looks first whether the
 * file is there, as its parent does, which excludes writers of this driver.
 *
 * <p>Janino compiles it, which knows no generic types and no try with resources.
 */
public class S3LogStore extends S3SingleDriverLogStore {
    private static final String CONDITION = "fs.option.create.conditional.overwrite";

    public S3LogStore(Configuration configuration) {
        super(configuration);
    }

    public void write(Path path, Iterator actions, Boolean overwrite, Configuration configuration) throws IOException {
        FileSystem store = path.getFileSystem(configuration);
        if (overwrite.booleanValue() || !store.hasPathCapability(path, CONDITION)) {
            super.write(path, actions, overwrite, configuration);
            return;
        }
        synchronized (path.toString().intern()) {
            if (store.exists(path)) {
                throw new FileAlreadyExistsException(path.toString());
            }
            ArrayList lines = new ArrayList();
            ByteArrayOutputStream written = new ByteArrayOutputStream();
            while (actions.hasNext()) {
                Object line = actions.next();
                lines.add(line);
                written.write((line + "\n").getBytes(StandardCharsets.UTF_8));
            }
            byte[] content = written.toByteArray();
            FSDataOutputStreamBuilder builder = store.createFile(path);
            builder.overwrite(true); // or it looks itself whether the file is there, and asks for no condition
            builder.must(CONDITION, true);
            FSDataOutputStream file = (FSDataOutputStream) builder.build();
            try {
                file.write(content);
                file.close();
            } catch (AWSUnsupportedFeatureException refused) { // the store knows no such request
                super.write(path, lines.iterator(), overwrite, configuration);
            } catch (RemoteFileChangedException refused) {
                // a request whose answer was lost is sent again, and then our own file is there; each commit has an id
                if (!Arrays.equals(content, read(store, path))) {
                    throw new FileAlreadyExistsException(path.toString());
                }
            }
        }
    }

    private static byte[] read(FileSystem store, Path path) throws IOException {
        byte[] content = new byte[(int) store.getFileStatus(path).getLen()];
        FSDataInputStream file = store.open(path);
        try {
            file.readFully(0, content);
        } finally {
            file.close();
        }
        return content;
    }
}
